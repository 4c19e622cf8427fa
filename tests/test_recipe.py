"""A recipe as words of the command line and as JSON."""

from __future__ import annotations

import json

import pytest
from stored_runs import row_of

from specbench.base.errors import UsageError
from specbench.base.record import from_dict
from specbench.options import CacheOptions, DecodingOptions, ModelOptions, SamplingOptions
from specbench.recipe import Recipe, drafter_argument
from specbench.results.run import Run, find_config
from specbench.specs.drafters import Cascade, Lookup, Several, SmallModel, parse_drafter
from specbench.specs.models import ModelSpec
from specbench.specs.policies import parse_policy

SMALL = SmallModel(ModelSpec("folder", "/secret/place/small"), dtype="int4")
OTHER = SmallModel(ModelSpec("hub", "org/other", "v1"))
RECIPES = {
    "plain": Recipe(ModelSpec("builtin", "smollm2-135m")),
    "folders": Recipe(
        ModelSpec("folder", "/secret/place/big"),
        Several((Cascade(Lookup(n=4), SMALL), OTHER, parse_drafter("self:int8"))),
        parse_policy("fixed:gamma=4,verification=block"),
        ModelOptions(dtype="int8", device="balanced"),
        CacheOptions(cache="bit-exact"),
        DecodingOptions(max_new_tokens=48, stop=("a", "b"), model_defaults=False),
        SamplingOptions(temperature=0.7, seed=3),
    ),
    "layers of the target": Recipe(
        ModelSpec("folder", "/secret/big"), parse_drafter("mtp"), parse_policy("auto")
    ),
    "tree": Recipe(ModelSpec("gguf", "/secret/big.gguf"), OTHER, parse_policy("static-tree:nodes=8")),
}


@pytest.mark.parametrize("name", RECIPES)
def test_what_is_stored_is_read_again_without_paths(name):
    recipe = RECIPES[name]
    stored = recipe.to_json()
    assert "secret" not in json.dumps(stored)
    again = Recipe.from_json(json.loads(json.dumps(stored)))
    assert again.to_json() == stored
    assert str(again.drafter) == str(recipe.drafter)
    assert type(again.drafter) is type(recipe.drafter)
    assert (again.policy, again.decoding, again.sampling, again.caching) == (
        recipe.policy, recipe.decoding, recipe.sampling, recipe.caching,
    )  # fmt: skip


def test_words():
    assert RECIPES["plain"].arguments() == ["--drafter", "none", "--target", "smollm2-135m"]
    drafter = "lookup:n=4+/secret/place/small:dtype=int4|org/other@v1|self:int8"
    assert RECIPES["folders"].arguments() == [
        "--drafter", drafter, "--draft-policy", "fixed:verification=block", "--gamma", "4",
        "--target", "/secret/place/big:dtype=int8,device=balanced",
        "--cache", "bit-exact", "--max-new-tokens", "48",
        "--stop", "a", "--stop", "b", "--no-model-defaults", "--temperature", "0.7", "--seed", "3",
    ]  # fmt: skip
    stored = Recipe.from_json(RECIPES["folders"].to_json())
    assert drafter_argument(stored.drafter) == drafter.replace("/secret/place/", "/path/to/")


def test_a_target_and_a_drafter_may_say_their_dtype(tmp_path):
    for text in ("org/big:int4", "org/big:dtype=int4"):
        assert Recipe.of_target(text, SamplingOptions()) == Recipe(
            ModelSpec("hub", "org/big"), models=ModelOptions(dtype="int4")
        )
    assert parse_drafter("org/small:int4,device=cpu") == parse_drafter("org/small:dtype=int4,device=cpu")
    with pytest.raises(UsageError, match="does not go with --dtype int8"):
        Recipe.of_target("org/big:int4", ModelOptions(dtype="int8"))
    (tmp_path / "a:int4").mkdir()
    assert Recipe.of_target(str(tmp_path / "a:int4")).models.dtype == "auto"


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("lookup@2", "lookup@2"),
        ("auto", "small@auto"),
        ("small", "small@auto"),
        ("lookup", None),
        ("plain", "plain"),
    ],
)
def test_a_row_has_a_short_name_that_is_no_others(name, found):
    rows = [row_of(each).to_json() for each in ("plain", "lookup@2", "lookup@4", "small@auto")]
    run = {"run_id": "r", "configs": rows, "options": {}, "target": {}, "environment": {}, "prompts": []}
    known = from_dict(run, Run)
    if found is None:
        with pytest.raises(UsageError, match="There is no configuration 'lookup' in here"):
            find_config(known, name, "here")
    else:
        assert find_config(known, name, "here").id == found


def test_plainly():
    plain = RECIPES["folders"].plain
    assert (plain.drafter.is_plain, plain.policy) == (True, None)
    assert plain.models.dtype == "int8"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("drafter", "looukp"), ("draft_policy", "nothing"), ("models", {"dtype": 7}),
        ("decoding", {"max_new_tokens": "7"}),
        ("decoding", {"max_new_tokens": 0}),
    ],
)  # fmt: skip
def test_a_row_that_this_version_does_not_know_is_refused(field, value):
    stored = {**RECIPES["tree"].to_json(), field: value}
    with pytest.raises(UsageError):
        Recipe.from_json(stored)
    rows = [row_of("plain").to_json(), row_of("lookup@2").to_json()]
    rows[1]["decoder"] = {"type": "recipe", **stored}
    run = {"run_id": "r", "configs": rows, "options": {}, "target": {}, "environment": {}, "prompts": []}
    with pytest.raises(ValueError, match=r"\$\.configs\[1\]"):
        from_dict(run, Run)
