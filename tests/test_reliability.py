"""The figures of README's line on reliability are those of the files that they are counted in."""

from __future__ import annotations

import json

from tests import reliability
from tests.hostile import fuzz
from tests.matrix import DATA, documented

FACTS = json.loads(reliability.FILE.read_text())


def test_the_counts_are_those_of_the_files() -> None:
    assert {title: FACTS[title] for title in reliability.collected()} == reliability.collected()
    assert reliability.FILE.with_suffix(".md").read_text() == reliability.page(FACTS)


def test_the_data_of_the_table_of_states_are_those_of_its_page() -> None:
    cells = {(kind, wrapper, order): outcome for kind, wrapper, order, outcome in json.loads(DATA.read_text())["cells"]}
    assert cells == documented()


def test_every_kind_of_file_was_mutated() -> None:
    facts = json.loads(reliability.FUZZ.read_text())
    assert list(facts["kinds"]) == list(fuzz.KINDS)
    assert {counts["mutations"] for counts in facts["kinds"].values()} == {10_000}
    assert reliability.FUZZ.with_suffix(".md").read_text() == fuzz.page(facts)


def test_nothing_failed() -> None:
    wrong = ("fail", "left something", *reliability.FAULTS.values(), "without a sentence")
    found = {(title, word): counts[word] for title, counts in FACTS.items() for word in wrong if word in counts}
    assert len(found) == len(wrong)
    assert set(found.values()) == {0}
