import functools
import re

import pytest
from support import configuration_page

from headpond.config import RunConfig
from headpond.config.declared import declarations
from headpond.config.problems import all_keys


@functools.cache
def rows() -> dict[str, list[str]]:
    """Cells of the generated page, by setting."""
    found, section = dict[str, list[str]](), ""
    for line in configuration_page.page().splitlines():
        if heading := re.match(r"## `\[(.+)\]`", line):
            section = f"{heading[1]}."
        elif row := re.match(r"\| `(\w+)` \|", line):
            found[section + row[1]] = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
    return found


def test_the_page_has_a_row_with_a_meaning_for_every_setting() -> None:
    assert set(rows()) == set(all_keys(RunConfig))
    assert [key for key, cells in rows().items() if len(cells) != 6 or not cells[5]] == []


@pytest.mark.parametrize(
    ("key", "at_resume", "restart"),
    [
        ("seed", "fixed", ""),
        ("steps", "free", ""),
        ("advantages.estimator", "free", "compute"),
        ("policy.sampling.top_p", "free", "rollouts"),
        ("environments.NAME.options", "fixed", ""),
    ],
)
def test_a_row_says_whether_the_setting_may_change_and_what_restarts(key: str, at_resume: str, restart: str) -> None:
    assert rows()[key][3:5] == [at_resume, restart]


def test_every_row_agrees_with_the_declaration() -> None:
    for key, declared in declarations(RunConfig):
        expected = ["fixed", ""] if declared.fixed else ["free", ", ".join(declared.restarts)]
        assert rows()[key][3:5] == expected, key
