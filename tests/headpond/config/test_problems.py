import pytest

from headpond.config.problems import line_of


@pytest.mark.parametrize(
    ("text", "keys", "line"),
    [
        ("a = 1\nb = 2", ["b"], 2),
        ("a = 1\n[t]\na = 2", ["t", "a"], 3),
        ('[ "t" ]\n"a" = 2', ["t", "a"], 2),
        ("t.a = 2", ["t", "a"], 1),
        ("t = {a = 2}", ["t", "a"], 1),
        ("[t.u]\na = 2", ["t", "u", "a"], 2),
        ("# a = 1\n", ["a"], None),
        ("t.u = 1", ["t"], 1),
        ("[t.u]\na = 1", ["t", "b"], 1),
        ("a = [\n  1,\n\n  2, # two\n]\nb = 1", ["a", "1"], 4),
        ("a = [1, 2]", ["a", "1"], 1),
        ('a = """\nb = 1\n"""\nb = 2', ["b"], 4),
        ("[[t]]\na = 1", ["t"], 1),
        ("t = {a = 1, b = {c = 2}}", ["t", "b", "c"], 1),
    ],
)
def test_the_line_of_a_setting_is_found(text: str, keys: list[str], line: int | None) -> None:
    assert line_of(text, keys) == line
