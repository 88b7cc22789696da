"""A mistake is one file: each rule is found by its id, and no other text is taken for one."""

from __future__ import annotations

import pytest

from samestep.report import language
from samestep.rules import rule_ids, rule_of


def test_each_rule_is_found_by_its_id_and_has_no_other_sentence() -> None:
    assert all(rule_of(identity) for identity in rule_ids())
    assert not rule_ids() & language.catalogue().keys()


@pytest.mark.parametrize("identity", ["", "__init__", "of_no_rule", "../errors", "set_epoch_never_called.RULE"])
def test_what_is_no_id_of_a_rule_is_not_imported(identity: str) -> None:
    """A message may come from anybody's file."""
    assert rule_of(identity) is None
