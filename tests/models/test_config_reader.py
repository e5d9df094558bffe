"""No key of a config that may change the maths is passed over."""

from typing import Any

import pytest

from slipstream.core.errors import CheckpointError, UsageError
from slipstream.models.config_reader import HARMLESS_KEYS, ConfigReader, overridden


def reader(**config: Any) -> ConfigReader:
    return ConfigReader(config, "m/config.json")


def test_values_are_handed_out() -> None:
    config = reader(a=1, b="x", c=True, d=0.5, e=[1], f={"g": 2})
    assert config.take("a", int) == 1
    assert config.take("b", str) == "x"
    assert config.take("c", bool) is True
    assert config.take("d", float) == 0.5
    assert config.take("e", list) == [1]
    assert config.take("f", dict) == {"g": 2}
    config.finish()


def test_an_integer_is_a_number_too() -> None:
    value = reader(theta=10000).take("theta", float)
    assert value == 10000.0
    assert isinstance(value, float)


@pytest.mark.parametrize(
    ("value", "kind", "wanted"),
    [
        (1.0, int, "an integer"),
        (True, int, "an integer"),
        (True, float, "a number"),
        (10**400, float, "a number of ordinary size"),
        (2**31, int, "an integer of ordinary size"),
        ("1", int, "an integer"),
        (1, bool, "true or false"),
        (1, str, "a text"),
        ("x", list, "a list"),
        ([], dict, "an object"),
    ],
)
def test_wrong_types(value: Any, kind: type, wanted: str) -> None:
    with pytest.raises(CheckpointError, match=rf'^m/config\.json: "key" must be {wanted}, not '):
        reader(key=value).take("key", kind)


def test_missing_and_null() -> None:
    config = reader(none=None)
    assert config.take("none", int, 3) == 3
    assert config.take("missing", int, 3) == 3
    assert config.take_optional("none", int, 3) is None
    assert config.take_optional("missing", int, 3) == 3
    for key in ("none", "missing"):
        with pytest.raises(CheckpointError, match=f'"{key}" is missing'):
            config.take(key, int)


def test_expected_values() -> None:
    reader(act="silu").expect("act", "silu")
    reader(act=None).expect("act", "silu")
    reader().expect("act", "silu", "silu")
    with pytest.raises(CheckpointError, match='"act" is "gelu", but only "silu" is supported'):
        reader(act="gelu").expect("act", "silu")
    with pytest.raises(CheckpointError, match='"act" is "gelu", but only "silu" is supported'):
        reader().expect("act", "silu", "gelu")


def test_unknown_keys_are_named() -> None:
    config = reader(known=1, logit_scale=0.1)
    config.take("known", int)
    with pytest.raises(
        CheckpointError,
        match=r'"logit_scale" is unknown \(value 0\.1\) and might change .* from hf_overr',
    ):
        config.finish()


@pytest.mark.parametrize("value", [None, False, "", [], {}])
def test_unknown_keys_that_are_off(value: Any) -> None:
    reader(new_feature=value).finish()


@pytest.mark.parametrize("value", [0, 0.0, True, "x", [0], {"a": None}])
def test_unknown_keys_that_may_be_on(value: Any) -> None:
    with pytest.raises(CheckpointError, match="new_feature"):
        reader(new_feature=value).finish()


def test_harmless_keys_are_passed_over() -> None:
    reader(**dict.fromkeys(HARMLESS_KEYS, "anything")).finish()


def test_a_long_value_is_cut_in_the_message() -> None:
    with pytest.raises(CheckpointError, match=r"\.\.\.\) and might") as caught:
        reader(big=list(range(1000))).finish()
    assert len(str(caught.value)) < 300


def test_nested_objects() -> None:
    config = reader(rope={"type": "linear", "odd": 1}, none=None)
    inner = config.nested("rope")
    assert inner.take("type", str) == "linear"
    with pytest.raises(CheckpointError, match=r'"rope\.odd" is unknown'):
        inner.finish()
    config.nested("none").finish()
    config.finish()


def test_harmless_keys_are_not_harmless_within_objects() -> None:
    with pytest.raises(CheckpointError, match=r"rope\.dtype"):
        reader(rope={"dtype": "x"}).nested("rope").finish()


def test_any_value_can_be_taken() -> None:
    config = reader(key=True)
    assert config.take_any("key") is True
    assert config.take_any("other") is None
    config.finish()


@pytest.mark.parametrize("value", [3, "x", [1]])
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_rope_parameters_that_are_no_object(key: str, value: Any) -> None:
    assert overridden({key: value}, {"rope_theta": 2.0}) == {key: value, "rope_theta": 2.0}
    with pytest.raises(UsageError, match=f"hf_overrides: {key} must be an object, not "):
        overridden({}, {key: value})
