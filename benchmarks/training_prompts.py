# ruff: noqa: E501 - a text is one line
"""Write the prompts that heads are trained on, `prompts/training/prompts.jsonl`, from templates and subjects.

    python benchmarks/training_prompts.py

Every subject is combined with a few of its category's templates, in turn. None is a prompt that is measured on, or
close to one (tests/test_training_prompts.py). Prints one line of JSON at the end: the number of prompts by category.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

FILE = Path(__file__).parents[1] / "prompts" / "training" / "prompts.jsonl"


def lines(text: str) -> list[str]:
    """Return one entry for each line."""
    return [line.strip() for line in text.strip().splitlines()]


def words(text: str) -> list[str]:
    """Return the entries between semicolons."""
    return [" ".join(each.split()) for each in text.split(";") if each.strip()]


THINGS = words("""
    how a refrigerator keeps food cold; how vaccines work; what inflation is; how a bill becomes a law; what a black
    hole is; how bees make honey; why leaves change colour in autumn; how the human heart pumps blood; what compound
    interest is; how a touch screen notices a finger; why the Moon has phases; how bread dough rises; what an enzyme
    does; how a suspension bridge carries its load; what machine learning is; how plants drink water; why we dream; how
    an aeroplane stays in the air; what supply and demand mean; how a microwave oven heats soup; what photosynthesis
    is; how a battery stores energy; why ice floats; how earthquakes happen; what an atom is made of; how the eye sees
    colours; how coffee is made from a cherry; what an algorithm is; how a lock and key work; why metals rust; how a
    rainbow forms; what the water cycle is; how muscles grow; what DNA is for; how a search engine finds pages; why
    onions make us cry; how soap cleans; what a recession is; how glass is made; how whales talk to each other; what
    gravity is; how a violin makes its sound; how satellites stay in orbit; what a virus is; how elections are counted;
    how cheese is made; what evolution by natural selection says; how a thermometer works; why deserts are cold at
    night; how the internet moves a message; what a hash table is; how a wind turbine makes electricity; what cholesterol
    does in the body; how a camera lens focuses; how trees talk through fungi; what a contract is; how paper is recycled;
    why time zones exist; how the stock market works; what plate tectonics is
""")

EXPLAIN = lines("""
    Explain {} to a ten-year-old.
    Explain {} in simple words.
    Can you explain {} step by step?
    Give a short explanation of {}, and then one example from daily life.
    Describe {} in two paragraphs for a school newspaper.
    I never understood {}. Please explain it as you would to a friend.
    Write an introduction to {} for beginners.
    In about a hundred words: {}.
""")

ADVICE_SUBJECTS = words("""
    sleep better during a stressful month; learn to cook with a small budget; make friends in a new city; stop putting
    things off; prepare for a job interview; begin to run in winter; save money for a long trip; keep a garden on a
    balcony; speak in front of a large audience; look after an elderly dog; learn a language in the evening; organise a
    small wedding; move into a shared flat; get better at chess; read more books; keep a diary; give feedback to a
    colleague; ask for a higher salary; spend less time on my phone; take better photographs with an old camera; plan a
    week of lunches; help a child with homework; fix a squeaking door; choose a first bicycle; clean a very messy
    kitchen; write a good application; begin to meditate; train a young cat; survive a long flight; repair a
    friendship; teach my father to use a computer; grow tomatoes from seed; study for three exams at once; work from
    home with two children; choose a musical instrument; drink less coffee; handle a noisy office; start a small shop
    online; get over a cold; pack for a week in the mountains
""")

ADVICE = lines("""
    I want to {}. Where do I start?
    How can I {}? Please give me a plan for the first two weeks.
    What are the best ways to {}?
    Give me five practical tips to {}.
    I have tried to {} and failed twice. What should I do differently?
    What mistakes do people make when they try to {}?
""")

LIST_SUBJECTS = words("""
    healthy breakfasts; things to see in Rome; uses of baking soda; games for a rainy afternoon; famous women in science;
    gifts for a teacher; names for a small bakery; exercises without equipment; ways to save water at home; dishes with
    lentils; hobbies for a quiet person; animals that live in the Arctic; inventions of the nineteenth century; plants
    that need little light; questions to ask on a first date; jobs that involve travelling; ideas for a birthday party at
    home; books about the sea; habits of good programmers; risks of a new business; songs for a road trip; foods that are
    rich in iron; reasons to learn to swim; topics for a podcast about history; signs of burnout; tools every home should
    have; ways to reuse glass jars; sports that need no ball; rivers in Africa; rules for a reading club; vegetables to
    plant in spring; questions for an interview with an artist; desserts without sugar; ideas for a school project about
    energy; mistakes in presentations; small acts of kindness; museums worth a visit; ways to calm a crying baby;
    reasons why projects fail; materials for building a house
""")

LIST = lines("""
    List ten {}.
    Give me a numbered list of seven {}, each with one sentence of explanation.
    Name five {} and say which one you like best and why.
    Make a bulleted list of {}.
    What are some {}?
    Suggest six {}, from the most common to the least common.
""")

STORY_SUBJECTS = words("""
    a baker who can hear what bread thinks; two brothers who find a map in a library book; a robot that wants to learn to
    paint; a dragon who is afraid of fire; a girl who trades her shadow for a song; an old sailor and a talking parrot; a
    train that never arrives; a town where it rains upwards; a detective who solves crimes by smell; a cat that becomes
    mayor; the last tree in a big city; a postman on a very small island; a wizard who has lost his spelling; a boy who
    collects lost sounds; a clock that runs backwards; a queen who hates being queen; a spider that knits scarves; an
    astronaut who receives a letter from home; a haunted bakery; a friendship between a fox and a goose; a violin that
    plays only at night; a teacher on the first day of school; a mountain that walks; a thief who gives things back; a
    family that lives under a bridge; a snowman in summer; a painter who runs out of blue; the first day of spring in a
    village; a very polite ghost; a race between a snail and a river; a boat made of paper; a shopkeeper who sells
    dreams; a knight without a horse; a scientist who shrinks by accident; a lost mitten; a market on the Moon
""")

STORY = lines("""
    Write a short story about {}.
    Tell me a bedtime story about {}.
    Write the opening paragraph of a novel about {}.
    Write a story about {}, with a surprising ending.
    Write a poem of four verses about {}.
    Write a short dialogue from a film about {}.
""")

LETTER_SUBJECTS = words("""
    to my landlord, because the heating does not work; to a hotel, to change the date of a booking; to a professor, to ask
    for more time for an essay; to a customer whose parcel got lost; to my team, about a new way to plan our work; to a
    neighbour, to thank him for looking after my plants; to a company, to apply for an internship; to my old school, to
    ask for a copy of a certificate; to a friend who has lost her job; to the town council, about a dangerous crossing; to
    a shop, to return a pair of shoes; to my aunt, to congratulate her on her new house; to a dentist, to cancel an
    appointment; to colleagues, to say goodbye on my last day; to a library, to suggest longer opening hours; to my boss, to
    ask for two days of leave; to a supplier, about a wrong invoice; to parents, about a school trip; to a musician, to ask
    whether he would play at a party; to volunteers, to thank them after a festival; to a bank, to close an account; to a
    sports club, to end a membership; to a pen friend, about my home town; to a newspaper, about the lack of bicycle lanes
""")

LETTER = lines("""
    Write an email {}.
    Write a polite letter {}. Keep it under 150 words.
    Draft a short message {}.
    Write a formal letter {}, with a subject line.
""")

TASKS = words("""
    reverses a string without using slices; counts how often each word occurs in a text; checks whether a number is
    prime; merges two sorted lists; finds the second largest value of a list; converts Celsius to Fahrenheit and back;
    reads a CSV file and returns the sum of a column; removes duplicates from a list but keeps the order; computes the
    factorial of a number; checks whether brackets are balanced; returns the Fibonacci numbers below a limit; flattens a
    nested list; groups words by their first letter; finds the longest common prefix of several words; computes the
    average and the median of a list; encodes a text with a Caesar cipher; turns an integer into Roman numerals; checks
    whether two words are anagrams; sorts a list of dictionaries by a key; finds all files with a given ending in a
    folder; retries a function up to three times when it fails; formats a number of seconds as hours, minutes and
    seconds; transposes a matrix; implements binary search; computes the greatest common divisor; splits a list into
    chunks of a given size; validates an email address; counts vowels; prints a multiplication table; caches the results
    of another function; finds the shortest path in a small graph; parses a date such as 2021-03-09; computes the
    distance between two points; rotates a list by n places; simulates a dice game; keeps a stack with push and pop;
    finds missing numbers in a sequence; replaces several spaces by one; checks a password for its strength; writes a
    dictionary to a JSON file
""")

CODE = lines("""
    Write a Python function that {}.
    Write a JavaScript function that {}, with comments.
    Show me how to write a function in Python that {}. Explain how it works.
    Write a Java method that {}.
    Write a C function that {}, and a main function that calls it.
    Write a Python program that {}, and add a few tests.
""")

CODE_QUESTIONS = lines("""
    What is the difference between a list and a tuple in Python?
    Explain recursion with a small example in Python.
    How do I read a file line by line in Python?
    What does the keyword static mean in Java?
    Write a SQL query that returns the five customers with the most orders.
    Write a SQL query that joins a table of students with a table of grades.
    How do I undo the last commit in git?
    Write a bash script that renames all .txt files in a folder to .md.
    What is the difference between == and === in JavaScript?
    Write an HTML page with a form for a name and an email address.
    Write a CSS rule that centres a box on a page.
    Explain what an API is and show a request in Python.
    Write a regular expression that matches phone numbers such as 555-1234, and explain it.
    What is a pointer in C? Give an example.
    How does a for loop differ from a while loop?
    Write a Python class for a bank account with deposit and withdraw.
    Write a class for a rectangle in Java with area and perimeter.
    How do I handle exceptions in Python? Show an example.
    Write a small web server in Python with Flask that says hello.
    What is object-oriented programming?
    Write a React component that shows a counter with two buttons.
    Explain the difference between a process and a thread.
    How can I sort a dictionary by value in Python?
    Write a Dockerfile for a small Python program.
    What is Big O notation? Give three examples.
    Write a unit test for a function that adds two numbers.
    Why is my Python program slow when I add strings in a loop?
    Write a Go program that prints the numbers from 1 to 20 and says which ones are even.
    Write a Rust function that sums the even numbers of a slice.
    Explain how a binary tree works and write one in Python.
""")

MATHS = [
    *(f"What is {a} times {b}? Show how you get there." for a, b in ((23, 17), (48, 12), (35, 64), (19, 31), (72, 15))),
    *(f"Solve the equation {a}x + {b} = {c}." for a, b, c in ((3, 7, 22), (5, -4, 31), (2, 9, 27), (7, 3, 52), (4, -11, 9))),
    *(f"Solve x^2 - {a}x + {b} = 0." for a, b in ((5, 6), (7, 10), (9, 20), (11, 28))),
    *(f"What is {a}% of {b}?" for a, b in ((15, 240), (8, 1250), (35, 60), (12.5, 400))),
    *(
        f"{name} buys {n} {thing} for {price} dollars each and pays with a {note} dollar note. How much change is there?"
        for name, n, thing, price, note in (
            ("Tom", 4, "notebooks", 3, 20), ("Lena", 6, "apples", 2, 50), ("Omar", 3, "tickets", 11, 50),
            ("Ruth", 7, "pens", 1.5, 20), ("Ivan", 5, "sandwiches", 4.2, 100),
        )
    ),
    *(
        f"A {vehicle} travels {distance} km in {hours} hours. What is its average speed?"
        for vehicle, distance, hours in (("train", 360, 4), ("bus", 195, 3), ("cyclist", 84, 3.5), ("ship", 504, 21))
    ),
    *(
        f"A rectangle is {a} cm long and {b} cm wide. Find its area and its perimeter, step by step."
        for a, b in ((8, 5), (12, 7), (15.5, 4), (30, 22))
    ),
    *(f"Find the {what} of {numbers}." for what, numbers in (
        ("average", "12, 15, 21 and 40"), ("median", "3, 9, 4, 17, 8"), ("greatest common divisor", "84 and 126"),
        ("least common multiple", "12 and 18"), ("sum", "the whole numbers from 1 to 50"),
    )),
    *lines("""
        What is the derivative of x^3 + 2x?
        What is the integral of 3x^2 from 0 to 2?
        Convert 45 miles to kilometres.
        Write 0.375 as a fraction in lowest terms.
        How many seconds are there in a week?
        Explain what a prime number is and list those below 40.
        Explain the theorem of Pythagoras with an example.
        A bag holds 3 red and 5 blue marbles. What is the chance to draw two red ones in a row?
        How many different ways are there to arrange the letters of the word MATH?
        A recipe for 4 people takes 300 g of rice. How much is needed for 7 people?
        The price of a coat falls from 120 to 90 dollars. By how many percent is that?
        If 5 machines make 5 parts in 5 minutes, how long do 100 machines take for 100 parts?
        What is the next number in 2, 6, 12, 20, 30? Explain the rule.
        Explain the difference between mean, median and mode.
        What is a logarithm? Give two examples.
        Prove that the sum of two even numbers is even.
        Add 3/4 and 5/6 and simplify the result.
        A tank holds 480 litres and loses 6 litres an hour. After how many hours is it half empty?
        Anna is twice as old as Ben. In six years they will be 42 together. How old is each?
        Explain how to compute the area of a circle and do so for a radius of 7.
    """),
]  # fmt: skip

PASSAGES = lines("""
    The town library opened its new reading room on Tuesday. It has forty seats, large windows and a small café. The old room was too dark, visitors had complained for years. The work took eleven months and cost less than planned, because local carpenters gave part of their time for free.
    Honey bees dance to tell each other where flowers are. A bee that has found food runs in a figure of eight on the comb. The direction of the middle line shows the angle to the sun, and the length of the dance shows how far away the food is. Other bees follow the dancer and then fly out.
    Our meeting on Thursday was short. Maria will write the report by Monday. Paul asks the printer for a new offer, since the last one was too high. We all agreed to move the launch from May to June. Nobody knew who keeps the keys of the store room, so Eva will find out.
    The first bicycles had no pedals. Riders pushed themselves along with their feet. In the 1860s pedals were fixed to the front wheel, which became larger and larger so that one turn carried the rider further. Only the chain made both wheels the same size again, and riding became safe.
    Mount Kera is 2,310 metres high. Two paths lead to the top. The northern one takes three hours and is steep; the southern one takes five hours and passes a lake. There is a hut at 1,800 metres which serves soup from June to September. In winter both paths are closed.
    Salt was once so valuable that soldiers were paid with it. Cities grew rich where salt roads crossed rivers. People used it to keep meat and fish through the winter. When refrigerators came, salt lost much of its worth, but it still stands on every table.
    The new tram line will be eleven kilometres long and have nineteen stops. Building begins next spring and lasts three years. Shop owners fear that customers will stay away while the streets are closed. The city promises to pay for lost income and to finish one section before it opens the next.
    Last summer our neighbours planted a hedge of berries between the gardens. Now blackbirds eat there every morning, the children pick what is left, and in the evening everybody talks over the leaves. A fence would have been cheaper, but nobody would have met.
    The museum shows ninety drawings by Ada Pell, who worked as a surveyor. For thirty years she drew the villages she measured, mostly at dawn. None of it was shown while she lived. A nephew found the drawings in a chest of maps and gave them to the museum.
    Customers may return goods within thirty days. The goods have to be unused and in their own box. We pay the money back within a week, but not the postage. Goods that were made to order cannot be returned. Please write the number of your order on the parcel.
    Sleep has stages. In the first one we are half awake and easily disturbed. Deep sleep follows, in which the body repairs itself. Dreams come mostly in the last stage, when the eyes move quickly. One round of all stages takes about ninety minutes and repeats four or five times a night.
    The farmers of the valley share one large press for apples. Each family gets a day in October. What is not drunk as juice becomes cider or vinegar. Before the press was bought together in 1987, most of the apples rotted in the grass, since no family could pay for a press alone.
    A strong storm hit the coast on Friday night. About two thousand homes were without power until noon. Three roads are blocked by trees. Nobody was hurt, but the roof of the sports hall was damaged. Schools stay closed on Monday, and the ferry does not run before Wednesday.
    Tea came to Europe in the seventeenth century. At first it was a medicine and very expensive. Later whole countries drank it every day. Ships raced each other to bring the first leaves of the year. Today more tea is drunk than any other drink but water.
    The company sells folding chairs. In the first quarter it sold 1,200, in the second 1,900, in the third 1,700 and in the fourth 2,600. Most customers are schools and small theatres. A new chair of bamboo was shown in November and is already a fifth of all sales.
    My grandfather repaired watches for fifty years. He said that a watch tells you what is wrong with it if you listen long enough. When his eyes grew weak, he taught me to listen. I cannot repair a watch, but I still hear when one is about to stop.
""")

SUMMARY = lines("""
    Summarise this text in one sentence: {}
    What are the three main points of the following text? {}
    Give the following text a title and a summary of two sentences. {}
    Shorten this text to half its length: {}
""")

REWRITE = lines("""
    Rewrite the following text in a more formal style: {}
    Rewrite this text for a child of eight: {}
    Rewrite this as a list of bullet points: {}
    Turn this text into a cheerful message to a friend: {}
""")

EXTRACT = lines("""
    List all numbers in this text and say what each of them means. {}
    Write five questions with answers about this text: {}
    Which people and places are named in this text? If there are none, say so. {}
    Extract the facts of this text as a Markdown table with two columns. {}
    Write the facts of this text as a JSON object: {}
""")

SENTENCES = lines("""
    The weather is beautiful today, so we are going to the park.
    I would like a cup of tea and a piece of cake, please.
    My brother works in a hospital and often comes home late.
    Could you tell me where the nearest station is?
    We have lived in this house for twelve years.
    The children are playing football behind the school.
    She forgot her umbrella on the bus this morning.
    How much does this red jacket cost?
    Tomorrow we will visit our grandparents in the country.
    I have never eaten anything so good.
    The book on the table belongs to my teacher.
    If it rains, the concert will take place indoors.
    Where did you buy these shoes?
    He is learning to play the guitar and practises every day.
    The meeting begins at nine o'clock on Monday.
    There are many old trees along the river.
""")

TRANSLATE = lines("""
    Translate into Spanish: "{}"
    Translate into French: "{}"
    Translate into German: "{}"
    How do you say this in Italian? "{}"
""")

FOREIGN = lines("""
    Translate into English: "Mañana vamos a la playa con nuestros amigos."
    Translate into English: "Je ne trouve pas mes clés, est-ce que tu les as vues ?"
    Translate into English: "Wir treffen uns um acht Uhr vor dem Kino."
    Translate into English: "Vorrei prenotare un tavolo per quattro persone."
    Translate into English: "O meu cão gosta de correr na praia."
    What does the French phrase "c'est la vie" mean, and when is it used?
    Explique en français ce qu'est un volcan.
    ¿Cuáles son los planetas del sistema solar?
    Was sind die Jahreszeiten, und warum gibt es sie?
    Écris une courte histoire sur un chat qui voyage en train.
    Escribe una carta corta a un amigo que está enfermo.
    Nenne fünf Tipps für gesundes Essen.
    Scrivi una breve poesia sul mare.
    Teach me ten useful words for travelling in Portugal.
    How do you count to ten in Japanese? Write the words in Latin letters.
""")

FACTS = lines("""
    Who was Marie Curie, and what is she known for?
    What caused the First World War?
    What is the tallest mountain in the world, and who climbed it first?
    Who wrote Don Quixote, and what is it about?
    What is the difference between a glacier and an iceberg?
    How many bones does an adult have, and which is the longest?
    What is the capital of Canada?
    Who painted the ceiling of the Sistine Chapel?
    What is the boiling point of water, and why does it change with height?
    Which countries does the Danube flow through?
    What did the Silk Road carry?
    Who was Nelson Mandela?
    What is the largest ocean, and how deep is it?
    When was the printing press invented, and why did it matter?
    What is the difference between a frog and a toad?
    Which gases make up the air?
    What is the Great Barrier Reef?
    Who was Isaac Newton?
    What happened in the French Revolution?
    How long does light take from the Sun to the Earth?
    What do vitamins do?
    Which animals sleep in winter?
    What is the United Nations, and what does it do?
    Why did the Roman Empire fall?
    What is the difference between a comet and an asteroid?
    Who invented the telephone?
    What are the primary colours?
    What is jazz, and where does it come from?
    How do penguins keep warm?
    What is the Industrial Revolution?
    What are the Olympic Games, and how did they begin?
    What is the difference between an alligator and a crocodile?
    Which is the longest river in South America?
    What is democracy?
    Who was Cleopatra?
    What is the function of the liver?
    Why is the sea salty?
    What are stem cells?
    What was the Renaissance?
    How old is the Earth, and how do we know?
""")

PAIRS = words("""
    cats and dogs as pets; electric cars and petrol cars; living in a city and living in the country; e-books and printed
    books; tea and coffee; trains and planes; Python and Java; working at home and working in an office; summer and winter;
    gas stoves and electric stoves; buying and renting a home; novels and short stories; online courses and classes;
    solar power and wind power; cash and cards; running and swimming; Mac and Windows; wood and steel for building;
    public and private schools; film cameras and digital cameras; vegetarian food and food with meat; large and small
    companies; bicycles and electric scooters; SQL and NoSQL databases; opera and musicals
""")

COMPARE = lines("""
    Compare {}.
    What are the advantages and disadvantages of {}?
    Write a short debate about {}.
    Make a table that compares {}.
""")

PLANS = words("""
    a weekend in Lisbon; a surprise party for my mother; a week of vegetarian dinners; a school day about the climate; a
    workout for thirty minutes a day; a picnic for ten people; a move to another city; a reading list for a month; a small
    kitchen garden; a team meeting of one hour; a birthday for a child of six; a winter holiday with little money; a first
    course in drawing; a charity run; a visit to a science museum with children; a home office in a small room; a study
    week before an exam; a bicycle tour of three days; a neighbourhood festival; a garage sale
""")

PLAN = lines("""
    Plan {} for me.
    Make a checklist for {}.
    Write a schedule for {}, hour by hour or day by day.
    What do I have to think of for {}?
""")

SMALL_TALK = lines("""
    Hello! What can you help me with?
    Tell me a joke.
    I feel a little lonely today.
    What should I cook tonight? I have eggs, potatoes and spinach.
    Recommend me a film for a quiet evening.
    Can you give me a riddle, and then the answer?
    I am bored. Suggest something to do.
    What is your favourite season, and why?
    Good morning! Give me something nice to think about today.
    I had an argument with my best friend. What now?
    Write a motivational message for a student before an exam.
    Tell me something interesting about the deep sea.
    Give me a tongue twister and explain why it is hard to say.
    What would you do with a free day in Paris?
    How are you today?
    Write a haiku about rain.
    Let us play a game: you think of an animal and give me three hints.
    Thank you for your help yesterday. Can you remember what we talked about?
    Explain a proverb of your choice.
    What is the meaning of life?
    Pretend to be a pirate and tell me about your day.
    You are a tour guide in ancient Rome. Welcome the group.
    Act as an interviewer for the job of a waiter and ask me three questions.
    You are a doctor for houseplants. My fern has brown tips.
    Write a slogan for a shop that repairs old radios.
    Write a product description for a wooden toy train.
    Write three tweets about a new park.
    Write a limerick about a goat.
    Write a recipe for pancakes.
    How do I make a good vegetable soup?
    Write instructions for changing a light bulb, step by step.
    Give me a vocabulary quiz with five words, and the answers at the end.
""")


_ALONE = 2


def paired(templates: list[str], subjects: list[str], uses: int) -> Iterator[str]:
    """Combine each subject with that many templates, different ones for its neighbor.

    The last ones, which training holds out to measure on, come once: no other prompt is about the same.
    """
    for place, subject in enumerate(subjects):
        for use in range(uses if place < len(subjects) - _ALONE else 1):
            text = templates[(place + use * (len(templates) // uses)) % len(templates)].format(subject)
            yield text[0].upper() + text[1:]


CATEGORIES = {
    "explanation": [*paired(EXPLAIN, THINGS, 2)],
    "advice": [*paired(ADVICE, ADVICE_SUBJECTS, 2)],
    "list": [*paired(LIST, LIST_SUBJECTS, 2)],
    "story": [*paired(STORY, STORY_SUBJECTS, 2)],
    "letter": [*paired(LETTER, LETTER_SUBJECTS, 1)],
    "code": [*paired(CODE, TASKS, 2), *CODE_QUESTIONS],
    "mathematics": MATHS,
    "summary": [*paired(SUMMARY, PASSAGES, 2)],
    "rewriting": [*paired(REWRITE, PASSAGES, 2)],
    "extraction": [*paired(EXTRACT, PASSAGES, 2)],
    "translation": [*paired(TRANSLATE, SENTENCES, 2), *FOREIGN],
    "facts": FACTS,
    "comparison": [*paired(COMPARE, PAIRS, 2)],
    "plan": [*paired(PLAN, PLANS, 2)],
    "chat": SMALL_TALK,
}


def rows() -> list[dict[str, object]]:
    """Return the prompts, in turn from the categories."""
    longest = max(map(len, CATEGORIES.values()))
    found: list[dict[str, object]] = []
    for place in range(longest):
        for category, prompts in CATEGORIES.items():
            if place < len(prompts):
                row = {"id": f"training-{len(found) + 1:04}", "category": category, "turns": [prompts[place]]}
                found.append(row)
    return found


if __name__ == "__main__":
    FILE.parent.mkdir(exist_ok=True)
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows())
    FILE.write_text(text, encoding="utf-8")
    print(json.dumps({category: len(prompts) for category, prompts in CATEGORIES.items()}))
