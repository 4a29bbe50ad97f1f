"""tests/CASES.md: every report from the field has tests that exist and carry its id, or a reason."""

import pathlib
import re

TESTS = pathlib.Path(__file__).parent
ROWS = [line.strip("| \n").split(" | ") for line in (TESTS / "CASES.md").read_text().splitlines() if re.match(r"\| R\d{3} \|", line)]
IDS = re.compile(r"\bR\d{3}\b|(?<=_)R\d{3}(?=_|\b)")


def sources():
    return {str(path.relative_to(TESTS)): path.read_text() for path in TESTS.rglob("test_*.py") if path.name != "test_cases.py"}


def test_every_row_is_complete():
    assert len(ROWS) == 123
    assert sorted({row[0] for row in ROWS}) == sorted(row[0] for row in ROWS)
    for row in ROWS:
        assert len(row) == 4, row
        assert all(row), row


def test_named_tests_exist_and_carry_the_id():
    files = sources()
    functions = {name: re.findall(r"^def (test_\w+)", text, re.M) for name, text in files.items()}
    for case, _, _, cell in ROWS:
        for named in re.findall(r"`([^`]*::[^`]*)`", cell):
            file, _, function = named.partition("::")
            assert file in files, f"{case}: there is no {file}"
            assert function in functions[file], f"{case}: {file} has no {function}"
            assert case in files[file], f"{case}: {file} does not mention it"


def test_ids_in_tests_are_rows():
    known = {row[0] for row in ROWS}
    for name, text in sources().items():
        assert set(IDS.findall(text)) <= known, name
