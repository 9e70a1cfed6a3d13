import copy
import pickle

import pytest

from morphkv import CacheConfig, find_profile, profiles

DEFAULTS = {
    "budget": 512,
    "n_sink": 4,
    "window": 8,
    "recent": 0,
    "pool": 1,
    "fusion": "mean",
    "queries": "keys",
    "policy": "morphkv",
    "seed": 0,
}
OTHERS = {
    "budget": 64,
    "n_sink": 2,
    "window": 4,
    "recent": 16,
    "pool": 7,
    "fusion": "max",
    "queries": "attention",
    "policy": "random",
    "seed": 2**63,
}


def test_the_defaults_are_those_of_the_reference_page():
    config = CacheConfig()
    assert {name: getattr(config, name) for name in DEFAULTS} == DEFAULTS


def test_every_field_can_be_given_and_read():
    config = CacheConfig(**OTHERS)
    assert {name: getattr(config, name) for name in OTHERS} == OTHERS


def test_a_config_cannot_be_changed():
    with pytest.raises(AttributeError):
        CacheConfig().budget = 3


def test_equal_fields_make_equal_configs_with_equal_hashes():
    assert CacheConfig(**OTHERS) == CacheConfig(**OTHERS)
    assert hash(CacheConfig(**OTHERS)) == hash(CacheConfig(**OTHERS))
    assert CacheConfig() != "CacheConfig()" and CacheConfig() != None  # noqa: E711


@pytest.mark.parametrize("field", OTHERS)
def test_one_other_field_makes_another_config(field):
    base = CacheConfig(recent=16)
    assert CacheConfig(**{"recent": 16, field: OTHERS[field] if field != "recent" else 17}) != base


def test_the_repr_is_the_call_that_makes_it():
    assert eval(repr(CacheConfig(**OTHERS))) == CacheConfig(**OTHERS)


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c))]
)
def test_copies_are_equal(copied):
    assert copied(CacheConfig(**OTHERS)) == CacheConfig(**OTHERS)


@pytest.mark.parametrize(
    "fields, text",
    [
        ({"budget": 0}, "budget 0 .* at least 1 row"),
        ({"budget": 2**40}, "budget 1099511627776 .* 16777216"),
        ({"window": 0}, "window 0 .* window must be >= 1"),
        ({"n_sink": -1}, "n_sink -1 is negative"),
        ({"budget": 8, "n_sink": 4, "window": 4}, "no evictable positions .* at least 9"),
        ({"pool": 4}, "pool 4 is not an odd number"),
        ({"recent": 3}, "recent 3 is below window 8"),
        ({"fusion": "sum"}, "fusion 'sum' is not known: use one of mean, max"),
        ({"queries": "values"}, "queries 'values' is not known: use one of attention, keys"),
        ({"policy": "lru"}, "policy 'lru' is not known: use one of morphkv, "),
    ],
)
def test_a_value_out_of_its_limits_is_a_value_error_that_says_what_to_do(fields, text):
    with pytest.raises(ValueError, match=text):
        CacheConfig(**fields)


@pytest.mark.parametrize(
    "fields",
    [{"budget": 1.5}, {"budget": "16"}, {"fusion": 3}, {"seed": -1}, {"policy": None}, {"bits": 4}],
)
def test_a_wrong_type_or_name_is_a_type_error(fields):
    with pytest.raises(TypeError):
        CacheConfig(**fields)


def test_profiles_are_configurations_under_a_name():
    assert [p.name for p in profiles()] == ["document", "chat", "reference", "paper"]
    assert find_profile("reference").with_budget() == CacheConfig()
    paper = find_profile("paper")
    assert paper.with_budget(256) == CacheConfig(budget=256, window=32, queries="attention")
    assert find_profile("document").with_budget(256).recent == 64
    with pytest.raises(ValueError, match="window 32"):
        paper.with_budget(16)
    assert paper.prefill == "whole" and paper.guide_text == "" and "paper" in paper.why
    assert find_profile("chat").guide_text
    with pytest.raises(ValueError, match="'fast' is not one of document, chat"):
        find_profile("fast")
