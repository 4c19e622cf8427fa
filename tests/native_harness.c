/* Passes of random models over random shapes, masks and caches, for sanitizers: one thread and several have to give the
 * same bits. All memory is as large as what is asked for, and no larger. Exit code 1 where something differs.
 */
#include "../specbench/kernels/native.c"

#include <pthread.h>
#include <stdio.h>

enum { HIDDEN = 64, HEADS = 6, SHARED = 2, SIZE = 16, MIDDLE = 128, LAYERS = 2, WORDS = 75, MOST_PAST = 600, MOST_ROWS = 32 };

static uint64_t state = 88172645463325252u;

static uint32_t drawn(uint32_t below) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (uint32_t)(state >> 33) % below;
}

static float number(void) { return (float)drawn(2001) / 1000.0f - 1.0f; }

static float *numbers(int64_t count) {
    float *made = malloc(sizeof *made * (size_t)count);
    for (int64_t i = 0; i < count; i++) made[i] = number();
    return made;
}

/* Random entries of a cache or queries, in float32 or bfloat16. */
static char *entries_of(size_t count, int is_bfloat16) {
    const size_t entry = is_bfloat16 ? 2 : 4;
    char *made = malloc(count * entry);
    for (size_t i = 0; i < count; i++) {
        const float value = number();
        const uint16_t half = to_bfloat16(value);
        memcpy(made + i * entry, is_bfloat16 ? (const void *)&half : (const void *)&value, entry);
    }
    return made;
}

static Matrix matrix(int outputs, int inputs, int bits, int biased, int level) {
    Matrix made = {.outputs = outputs, .inputs = inputs, .bits = bits, .width = PANEL, .depth = padded_to_groups(inputs)};
    const int64_t count = (int64_t)outputs * inputs;
    if (bits == 32) {
        made.width = 64;
        const int panels = panels_of(&made);
        float *memory = calloc((size_t)panels, (size_t)panel_bytes(&made));
        for (int o = 0; o < outputs; o++)
            for (int k = 0; k < inputs; k++)
                memory[((int64_t)(o / 64) * made.depth + k) * 64 + o % 64] = number();
        made.panels = (uint8_t *)memory;
    } else {
        made.width = bits == 12 ? MOST_WIDTH : PANEL;
        const int capacity = made.width * inputs, panels = panels_of(&made);
        const int64_t size = specbench_packed_bytes(outputs, inputs, bits, made.width);
        uint8_t *memory = malloc((size_t)size);
        for (int64_t i = 0; i < size; i++) memory[i] = (uint8_t)drawn(0x3c); /* scales below 1 */
        uint32_t *exceptions = malloc(sizeof *exceptions * (size_t)(panels * capacity));
        int32_t *found = calloc((size_t)panels, sizeof *found);
        int8_t *bytes = malloc((size_t)count);
        uint16_t *halves = malloc(2 * (size_t)count);
        float *weight = numbers(count), *scales = numbers(outputs);
        for (int64_t i = 0; i < count; i++) {
            bytes[i] = (int8_t)((int)drawn(255) - 127);
            halves[i] = to_bfloat16(drawn(20) ? weight[i] : weight[i] * 1e-9f);
        }
        const Packing packing = {.bytes = bytes, .scales = scales, .weight = weight, .halves = halves, .panels = memory,
                                 .rows = outputs, .columns = inputs, .bits = bits, .width = made.width,
                                 .exceptions = exceptions, .found = found, .capacity = capacity};
        if (specbench_pack(&packing, NULL, 1, level)) exit(2);
        for (int panel = 0; bits == 12 && panel < panels; panel++)
            for (int step = 0; step < made.depth / 2; step += STRETCH)
                ((Block *)(memory + panel * panel_bytes(&made) + bytes_in_12_bits(step)))->first += panel * capacity;
        made.exceptions = exceptions;
        free(bytes);
        free(halves);
        free(weight);
        free(scales);
        free(found);
        made.panels = memory;
    }
    made.bias = biased ? numbers(outputs) : NULL;
    return made;
}

static void drop(const Matrix *matrix) {
    free((void *)matrix->panels);
    free((void *)matrix->exceptions);
    free((void *)matrix->bias);
}

typedef struct {
    void (*each)(void *);
    void *given;
} Call;

static void *called(void *given) {
    const Call *call = given;
    call->each(call->given);
    return NULL;
}

static void on_threads(void (*each)(void *), void *given, unsigned count, unsigned flags) {
    pthread_t threads[16];
    Call call = {each, given};
    (void)flags;
    for (unsigned i = 1; i < count; i++)
        if (pthread_create(&threads[i], NULL, called, &call)) exit(2);
    each(given);
    for (unsigned i = 1; i < count; i++) pthread_join(threads[i], NULL);
}

/* One pass, with one thread and with several; whether both give the same. */
static int same(const Model *model, int level) {
    const int rows = 1 + (int)drawn(MOST_ROWS), wanted = 1 + (int)drawn((uint32_t)rows), past = 1 + (int)drawn(MOST_PAST);
    const int is_bfloat16 = (int)drawn(2), keys = past + rows, masked = (int)drawn(2), told = (int)drawn(2);
    const size_t entry = is_bfloat16 ? 2 : 4, held = (size_t)(SHARED * keys * SIZE) * entry;
    float *x = numbers(rows * HIDDEN), *cosines = numbers(rows * SIZE), *sines = numbers(rows * SIZE);
    uint8_t *mask = malloc((size_t)(rows * keys));
    for (int r = 0; r < rows; r++)
        for (int k = 0; k < keys; k++) mask[r * keys + k] = k == past + r || (k < past + r && drawn(3) > 0);
    char *first[2 * LAYERS];
    for (int i = 0; i < 2 * LAYERS; i++) first[i] = entries_of(held / entry, is_bfloat16);
    const int64_t numbers_of_heads = (int64_t)rows * HEADS * SIZE;
    float *logits[2], *states[2], *attended[2], *queries = numbers(numbers_of_heads);
    char *entries[2][2 * LAYERS];
    for (int run = 0; run < 2; run++) {
        float *input = malloc(sizeof *x * (size_t)(rows * HIDDEN)), *of_layers[LAYERS + 1] = {NULL};
        memcpy(input, x, sizeof *x * (size_t)(rows * HIDDEN));
        logits[run] = calloc((size_t)(wanted * WORDS), sizeof(float));
        states[run] = calloc((size_t)(rows * HIDDEN), sizeof(float));
        of_layers[rows % (LAYERS + 1)] = states[run];
        void *of_keys[LAYERS], *of_values[LAYERS];
        int64_t strides[2 * LAYERS];
        for (int i = 0; i < 2 * LAYERS; i++) {
            entries[run][i] = memcpy(malloc(held), first[i], held);
            strides[i] = (int64_t)keys * SIZE;
            *(i % 2 ? &of_values[i / 2] : &of_keys[i / 2]) = entries[run][i];
        }
        const Request request = {.mask = masked ? mask : NULL, .mask_stride = keys, .past = past};
        int32_t which[rows];
        for (int i = 0; i < wanted; i++) which[i] = rows - wanted + i;
        const Pass pass = {
            .model = model, .x = input, .cosines = cosines, .sines = sines, .keys = of_keys, .values = of_values,
            .strides = strides, .requests = &request, .count = 1, .which = which, .logits = logits[run],
            .states = told ? of_layers : NULL, .states_stride = HIDDEN, .rows = rows, .wanted = wanted,
            .is_bfloat16 = is_bfloat16, .parallel = run ? on_threads : NULL, .threads = run ? 4 : 1, .level = level,
        };
        if (specbench_pass(&pass)) exit(2);
        Pass alone = pass;
        alone.x = queries;
        alone.logits = attended[run] = calloc((size_t)numbers_of_heads, sizeof(float));
        if (specbench_attend(&alone)) exit(2);
        free(input);
    }
    int alike = !memcmp(logits[0], logits[1], sizeof(float) * (size_t)(wanted * WORDS)) &&
                !memcmp(states[0], states[1], sizeof(float) * (size_t)(rows * HIDDEN)) &&
                !memcmp(attended[0], attended[1], sizeof(float) * (size_t)numbers_of_heads);
    for (int i = 0; i < wanted * WORDS; i++) alike = alike && isfinite(logits[0][i]);
    for (int i = 0; i < 2 * LAYERS; i++) {
        alike = alike && !memcmp(entries[0][i], entries[1][i], held);
        free(first[i]);
        free(entries[0][i]);
        free(entries[1][i]);
    }
    for (int run = 0; run < 2; run++) {
        free(logits[run]);
        free(states[run]);
        free(attended[run]);
    }
    free(queries);
    free(x);
    free(cosines);
    free(sines);
    free(mask);
    return alike;
}

/* The same for the attention of a prompt. */
static int same_prompt(int level) {
    static const int SIZES[] = {16, 48, 64, 80, 256};
    const int size = SIZES[drawn(5)], rows = 1 + (int)drawn(130), keys = rows + (int)drawn(600), window = (int)drawn(2) * (1 + (int)drawn(300));
    const int is_bfloat16 = (int)drawn(2);
    const size_t entry = is_bfloat16 ? 2 : 4, asked = (size_t)(rows * HEADS * size) * entry, held = (size_t)(SHARED * keys * size) * entry;
    char *given[3], *out[2];
    for (int i = 0; i < 3; i++) given[i] = entries_of((i ? held : asked) / entry, is_bfloat16);
    for (int run = 0; run < 2; run++) {
        out[run] = calloc(1, asked);
        const Prompt prompt = {
            .query = given[0], .keys = given[1], .values = given[2], .out = out[run], .query_strides = {size, HEADS * size},
            .keys_stride = keys * size, .values_stride = keys * size, .scaling = 0.25f, .rows = rows, .count = keys,
            .heads = HEADS, .shared = SHARED, .size = size, .is_bfloat16 = is_bfloat16, .window = window,
        };
        if (specbench_prompt(&prompt, run ? on_threads : NULL, run ? 4 : 1, level)) exit(2);
    }
    const int alike = !memcmp(out[0], out[1], asked);
    for (int i = 0; i < 3; i++) free(given[i]);
    for (int run = 0; run < 2; run++) free(out[run]);
    return alike;
}

int main(int count, char **arguments) {
    const int passes = count > 1 ? atoi(arguments[1]) : 10;
    static const int WIDTHS_IN_BITS[] = {4, 8, 12, 16, 32};
    for (int level = 1; level <= specbench_level(); level++) {
        for (int i = 0; i < passes; i++)
            if (!same_prompt(level)) {
                printf("prompt %d differs at level %d\n", i, level);
                return 1;
            }
        for (int i = 0; i < 5; i++) {
            const int bits = WIDTHS_IN_BITS[i], biased = i % 2;
            Layer layers[LAYERS];
            float *norms = numbers(6 * 64 + HEADS * SIZE);
            for (int l = 0; l < LAYERS; l++)
                layers[l] = (Layer){
                    .projections = matrix((HEADS + 2 * SHARED) * SIZE, HIDDEN, bits, biased, level),
                    .output = matrix(HIDDEN, HEADS * SIZE, bits, 0, level),
                    .gates = matrix(2 * MIDDLE, HIDDEN, bits, 0, level),
                    .down = matrix(HIDDEN, MIDDLE, bits, biased, level),
                    .attention_norm = norms, .mlp_norm = norms + 64,
                    .query_norm = biased ? norms + 128 : NULL, .key_norm = biased ? norms + 192 : NULL,
                    .attention_out_norm = biased ? norms + 320 : NULL, .mlp_out_norm = biased ? norms + 320 : NULL,
                    .window = biased && l ? 40 : 0, .rotation = l && i > 1 ? -1 : 0,
                };
            const Model model = {
                .layers = layers, .head = matrix(WORDS, HIDDEN, bits, 0, level), .norm = norms + 256, .count = LAYERS,
                .hidden = HIDDEN, .heads = HEADS, .shared = SHARED, .size = SIZE, .middle = MIDDLE,
                .epsilon = 1e-5f, .scaling = 0.25f, .turned = SIZE, .joint_norms = i == 1, .gelu = biased, .added = 0.5f,
            };
            for (int pass = 0; pass < passes; pass++)
                if (!same(&model, level)) {
                    printf("pass %d over weights in %d bits differs at level %d\n", pass, bits, level);
                    return 1;
                }
            for (int l = 0; l < LAYERS; l++) {
                drop(&layers[l].projections);
                drop(&layers[l].output);
                drop(&layers[l].gates);
                drop(&layers[l].down);
            }
            drop(&model.head);
            free(norms);
        }
    }
    return 0;
}
