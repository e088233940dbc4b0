"""All values of the chart, found by its schema: each has an effect, and none can break the YAML."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from charts import RELEASE, Manifest, Values, render, render_text, server
from helm_python import HelmError
from test_chart_renders import EVERY_KIND, check
from values_walk import RELEASES, Path, Schema, filled, fits, get, leaves, put

# What YAML takes for something else, or for syntax, where it stands without quotes.
ODD = ["::", "123", "1.5", "true", "null", "12:30", "# a", "{a", "*a", '"\\']
WORDS = ["odd", "a.b/odd", "a:odd", "http://odd", "5Gi", "sha256:" + "0" * 64, "7s", "--odd"]
LARGE = 3_000_000
LEAVES = [
    pytest.param(path, schema, id=".".join(str(step) for step in path)) for path, schema in leaves()
]


def objects(values: Values, name: str = RELEASE) -> list[Manifest]:
    """All objects. Raises when one of them is not YAML, or has a value of a wrong type."""
    items = render(values, name)
    for item in items:
        check(item)
    return items


def scalars(tree: Any) -> Iterator[Any]:
    """All values of a tree that are no map and no list."""
    if isinstance(tree, dict | list):
        for child in tree.values() if isinstance(tree, dict) else tree:
            yield from scalars(child)
    else:
        yield tree


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("odd", ODD)
def test_a_text_stays_a_text(odd: str, release: str) -> None:
    def make(schema: Schema) -> str | None:
        return next((text for text in (odd, f"http://{odd}") if fits(text, schema)), None)

    values = filled(RELEASES[release], make)
    assert values != RELEASES[release]
    objects(values)


@pytest.mark.parametrize("release", RELEASES)
def test_the_name_of_a_release_stays_a_text(release: str) -> None:
    assert objects(RELEASES[release], "123")


def test_an_address_of_ipv6_reaches_the_server_whole() -> None:
    assert "--address=::" in server({"server": {"address": "::"}})["args"]


@pytest.mark.parametrize("release", RELEASES)
def test_a_number_stays_a_number(release: str) -> None:
    values = filled(RELEASES[release], lambda schema: LARGE if fits(LARGE, schema) else None)
    found = [value for item in objects(values) for value in scalars(item)]
    assert LARGE in found
    assert not [value for value in found if re.search(r"\de\+\d", str(value))]


def manifests(values: Values) -> dict[str, str]:
    """What Helm makes of the templates of objects."""
    return {file: text for file, text in render_text(values).items() if file != "NOTES.txt"}


def changes(current: Any, schema: Schema) -> Iterator[Any]:
    """Other values that the schema may take in this one's place."""
    options = [
        *schema.get("enum", []),
        *(not current for _ in [1] if schema.get("type") == "boolean"),
        *(number for number in (2, 5, 61) if fits(number, schema)),
        *(word for word in WORDS if fits(word, schema)),
    ]
    if schema.get("type") == "array":
        item = dict.fromkeys(schema["items"].get("required", ["name"]), "odd")
        spread = {"topologyKey": "odd", "maxSkew": 1, "whenUnsatisfiable": "DoNotSchedule"}
        options += [[word] for word in WORDS] + [[item], [spread]]
    elif schema.get("type") == "object":
        names = ["odd", "RCLONE_ODD", "cpu"]
        options += [{**(current or {}), name: "7"} for name in names]
    return (option for option in options if option != current)


def has_effect(release: Values, path: Path, schema: Schema) -> bool:
    """Whether another value there makes another release."""
    before = manifests(release)
    for option in changes(get(release, path), schema):
        try:
            after = manifests(put(release, path, option))
        except (HelmError, KeyError):
            continue
        if after != before:
            return True
    return False


@pytest.mark.parametrize(("path", "schema"), LEAVES)
def test_every_value_has_an_effect(path: Path, schema: Schema) -> None:
    assert any(has_effect(release, path, schema) for release in RELEASES.values())


def test_between_them_the_releases_have_every_object() -> None:
    assert {item["kind"] for values in RELEASES.values() for item in objects(values)} == EVERY_KIND
