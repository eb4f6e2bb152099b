"""Whatever a spec says, the generator answers with every fault at its place, and nothing else."""

from __future__ import annotations

import ast
import os
import re
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from golden import GOLDENS, check_golden
from kvloom_codegen import checks, sources, spec, tree
from kvloom_codegen.checks import Specs, load
from kvloom_codegen.problems import SpecError
from kvloom_codegen.sources import KINDS, specs_dir
from kvloom_codegen.table import ProofError

ERRORS = GOLDENS / "errors"
CASES = sorted(path.name for path in ERRORS.iterdir())
EXPECTED = "expected.txt"
SOUND = "NL_X_NB_BS_HS.yaml"
MANUAL_LINE = re.compile(r"specs/[^:]+:[1-9]\d*:[1-9]\d*: \S.*")

# The chunk layouts of a case that brings none of its own.
CHUNKS = {
    "one_plane": "[layer, token, {fuse: [head, elem]}]",
    "two_plane": "[kv, layer, token, {fuse: [head, elem]}]",
    "record": "[layer, token, {fuse: [field, elem]}]",
    "two_plane_record": "[kv, layer, token, {fuse: [field, head, elem]}]",
}

LAYOUT = """\
layout: NL_X_NB_BS_HS
attention: mla
engines:
  - {name: An engine, alias: an-engine}
doc: A layout.
lists: [layer]
memory: [block, token, elem]
chunk: one_plane
"""


def write(folder: Path, files: Mapping[str, str | bytes]) -> Path:
    """``folder`` with these files, and with chunk layouts where there are none of them."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8"))
    if not (folder / "chunks").exists():
        (folder / "chunks").mkdir(parents=True)
        for name, memory in CHUNKS.items():
            text = f"chunk: {name}\ndoc: A chunk.\nmemory: {memory}\n"
            (folder / "chunks" / f"{name}.yaml").write_text(text, encoding="utf-8")
    return folder


def faults(folder: Path) -> list[str]:
    """The lines that are printed for a folder of specs; none where it is right."""
    try:
        load(folder)
    except SpecError as error:
        return str(error).splitlines()
    return []


def layout_faults(tmp_path: Path, text: str | bytes) -> list[str]:
    """What is said of one layout file, without the file's name."""
    found = faults(write(tmp_path, {"layouts/NL_X_NB_BS_HS.yaml": text}))
    return [line.replace("specs/layouts/NL_X_NB_BS_HS.yaml:", "") for line in found]


def copied(case: str, folder: Path) -> Path:
    shutil.copytree(ERRORS / case, folder, ignore=shutil.ignore_patterns(EXPECTED))
    return write(folder, {})


# --- goldens -------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_all_faults_are_reported_as_in_the_golden(
    case: str, tmp_path: Path, update_goldens: bool
) -> None:
    lines = faults(copied(case, tmp_path / "specs"))
    check_golden(ERRORS / case / EXPECTED, "".join(f"{line}\n" for line in lines), update_goldens)


@pytest.mark.parametrize("case", CASES)
def test_a_golden_names_the_place_and_what_is_allowed(case: str) -> None:
    lines = (ERRORS / case / EXPECTED).read_text(encoding="utf-8").splitlines()
    assert lines
    for line in lines:
        assert MANUAL_LINE.fullmatch(line)
        assert re.search(r"; allowed: \S|is missing; \S|: not YAML: \S", line)


@pytest.mark.parametrize("case", CASES)
def test_every_file_of_a_case_has_its_fault(case: str) -> None:
    """A layout that says nothing wrong is there for the fault of another file: a twin, a chunk, or
    any, where no specs but for one sound layout would be a fault of their own.
    """
    expected = (ERRORS / case / EXPECTED).read_text(encoding="utf-8")
    for path in sorted((ERRORS / case / "layouts").glob("*.yaml")):
        if path.name == SOUND or path.is_dir():
            continue
        chunk = re.search(r"^chunk: (\w+)$", path.read_text(encoding="latin1"), re.MULTILINE)
        reported = [f"specs/layouts/{path.name}:", f"as in specs/layouts/{path.name};"]
        reported += [f"specs/chunks/{chunk[1]}.yaml:"] if chunk else []
        assert any(words in expected for words in reported), f"{path.name} is idle"


def test_every_case_is_a_folder_of_specs_with_an_expectation() -> None:
    for case in CASES:
        assert (ERRORS / case / EXPECTED).is_file(), f"{case} lacks {EXPECTED}"
        assert [path.name for path in (ERRORS / case).iterdir() if path.name in KINDS]


# --- every message has a golden ------------------------------------------------------------------

MODULES = (sources, spec, tree, checks)
REPORTERS = ("Problem", "problem", "_problem", "_unreadable", "stop", "ValueError")
# A layout that keeps all rules has always been proved: only a broken generator comes here.
WITHOUT_GOLDEN = {("checks", "_proof")}


def message_sites() -> set[tuple[str, str, int]]:
    """(module, function, line) of each call that makes a problem."""
    found = set()
    for module in MODULES:
        file = Path(module.__file__ or "")
        for function in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(function, ast.FunctionDef):
                continue
            for node in ast.walk(function):
                if isinstance(node, ast.Call):
                    name = ast.unparse(node.func).rpartition(".")[2]
                    if name in REPORTERS and (file.stem, function.name) not in WITHOUT_GOLDEN:
                        found.add((file.stem, function.name, node.lineno))
    return found


def lines_run(action: Callable[[], object]) -> set[tuple[str, int]]:
    """(module, line) of what ``action`` runs of the modules that report problems."""
    files = {module.__file__: Path(module.__file__ or "").stem for module in MODULES}
    run: set[tuple[str, int]] = set()

    def trace(frame: FrameType, event: str, _: object) -> Any:
        module = files.get(frame.f_code.co_filename)
        if module is None:
            return None
        if event == "line":
            run.add((module, frame.f_lineno))
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    finally:
        sys.settrace(before)
    return run


def test_every_message_stands_in_a_golden(tmp_path: Path) -> None:
    folders = [copied(case, tmp_path / case) for case in CASES]
    run = lines_run(lambda: [faults(folder) for folder in folders])
    missed = {site for site in message_sites() if (site[0], site[2]) not in run}
    assert not missed


def test_every_key_of_the_language_is_refused_with_what_it_allows() -> None:
    lines = [
        line
        for case in CASES
        for line in (ERRORS / case / EXPECTED).read_text(encoding="utf-8").splitlines()
        if "; allowed: " in line
    ]
    models = [one for one in vars(spec).values() if isinstance(one, type)]
    keys = {
        key
        for one in models
        if issubclass(one, spec.BaseModel) and one is not spec.BaseModel
        for key in one.model_fields
    }
    refused = {
        re.sub(r"(\[\d+\])+$", "", place).rpartition(".")[2]
        for line in lines
        for place in [line.split(": ")[1]]
    }
    assert keys - refused == set()


# --- what a folder of files cannot hold ----------------------------------------------------------


def test_hidden_files_and_backups_are_the_editors_business(tmp_path: Path) -> None:
    files = {"layouts/NL_X_NB_BS_HS.yaml": LAYOUT, "README.md": "The manual.\n"}
    noise = ("layouts/.#NL_X_NB_BS_HS.yaml", "layouts/A.yaml~", ".git/A.yaml", ".DS_Store")
    assert faults(write(tmp_path, {**files, **dict.fromkeys(noise, "no spec")})) == []


@pytest.mark.skipif(not hasattr(os, "symlink"), reason="needs symbolic links")
def test_a_link_to_nothing_is_a_fault(tmp_path: Path) -> None:
    write(tmp_path, {"layouts/NL_X_NB_BS_HS.yaml": LAYOUT})
    (tmp_path / "layouts" / "LOST.yaml").symlink_to(tmp_path / "nowhere")
    (tmp_path / "layouts" / "SELF.yaml").symlink_to(tmp_path / "layouts" / "SELF.yaml")
    lost, itself = faults(tmp_path)
    assert lost.startswith("specs/layouts/LOST.yaml:1:1: can't be read")
    assert itself.startswith("specs/layouts/SELF.yaml:1:1: can't be read")


def test_a_folder_that_is_not_there_is_no_empty_project(tmp_path: Path) -> None:
    assert faults(tmp_path / "nowhere") == ["specs/layouts:1:1: no layouts; allowed: one or more"]


@pytest.mark.parametrize("ending", ["\n", "\r\n", "\r"])
def test_line_endings_change_nothing(tmp_path: Path, ending: str) -> None:
    assert layout_faults(tmp_path, LAYOUT.replace("\n", ending)) == []
    axes = "layer, kv, block, token, head, elem, one, elem/x, elem%x, token/x, token%x"
    assert layout_faults(tmp_path, LAYOUT.replace("token", "tokn").replace("\n", ending)) == [
        f"7:17: memory[1]: 'tokn'; allowed: {axes}"
    ]


def test_a_byte_order_mark_changes_nothing(tmp_path: Path) -> None:
    assert layout_faults(tmp_path, b"\xef\xbb\xbf" + LAYOUT.encode()) == []
    (line,) = layout_faults(tmp_path, LAYOUT.encode("utf-16"))
    assert line == "1:1: byte 0xff is not UTF-8; allowed: UTF-8 text"


def test_no_value_breaks_or_hides_the_line_that_reports_it(tmp_path: Path) -> None:
    for value in ("a\\nb", "a\\u2028b", "\\e[2J", "\\u202e", "\\ud800", "\\0", "\\u200b"):
        text = LAYOUT.replace("mla", f'"{value}"') + f'"{value}": 1\nsplit: {{"{value}": 1}}\n'
        lines = layout_faults(tmp_path, text)
        assert len(lines) >= 3
        assert all(line.isprintable() for line in lines)


@pytest.mark.parametrize(
    ("deep", "column"),
    [("[" * 100_000, 42), ("{a: " * 100_000, 159), ("- " * 5_000 + "a", 81), ("? " * 5_000, 81)],
    ids=["lists", "mappings", "blocks", "keys"],
)
def test_deep_nesting_is_a_fault(tmp_path: Path, deep: str, column: int) -> None:
    assert layout_faults(tmp_path, f"layout: A\nmemory:\n  {deep}\n") == [
        f"3:{column}: more than 40 levels deep; allowed: fewer"
    ]


def test_much_of_everything_is_checked_in_time_that_grows_with_it(tmp_path: Path) -> None:
    many = ", ".join(["head"] * 3_000)
    lines = layout_faults(tmp_path, LAYOUT.replace("[block", f"[{many}, block"))
    assert lines == ["7:1: memory: 'head' is reached twice; allowed: once"]


def test_a_spec_of_every_number_stays_small_enough_to_prove(tmp_path: Path) -> None:
    for number in ("999999999999999999", "9" * 5_000):
        text = LAYOUT.replace("[block, token, elem]", "[block, token/x, token%x, elem/y, elem%y]")
        text += f"id: {number}\nsplit: {{x: {number}, y: {number}}}\npad: {{block: {number}}}\n"
        assert layout_faults(tmp_path, text)


def test_a_failed_proof_is_a_fault_of_its_layout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ProofError("two elements at one place")

    monkeypatch.setattr(checks, "prove_layout", fail)
    assert layout_faults(tmp_path, LAYOUT) == [
        "7:1: memory: the proof fails: two elements at one place"
    ]


def test_a_chunk_that_cannot_be_read_is_not_reported_again_by_the_layouts_that_use_it(
    tmp_path: Path,
) -> None:
    files = {"layouts/NL_X_NB_BS_HS.yaml": LAYOUT, "chunks/one_plane.yaml": "chunk: ["}
    (line,) = faults(write(tmp_path, files))
    assert line.startswith("specs/chunks/one_plane.yaml:1:9: not YAML")


# --- random files --------------------------------------------------------------------------------

REAL = {
    path.relative_to(specs_dir()).as_posix(): path.read_text(encoding="utf-8")
    for kind in KINDS
    for path in sorted((specs_dir() / kind).glob("*.yaml"))
}
TEXT_OF_WORDS = """
    layer kv block token head elem one field region fuse key value elem/x elem%x token/x token%x
    x a any HS HS/16 16/itemsize at_bind example dtype width bits first low fp8 bf16 mha mla
    two_plane record NB BS yes on ~ null 0 1 -1 4 1.5 é 999999999999999999999
"""
WORDS = TEXT_OF_WORDS.split()

# --- a value is changed somewhere in the tree of a file


def changed(data: Any, draw: Callable[[st.SearchStrategy[Any]], Any]) -> Any:
    """``data`` with one change at a random place."""
    if isinstance(data, (dict, list)) and data and draw(st.integers(0, 4)):
        if isinstance(data, list):
            at = draw(st.integers(0, len(data) - 1))
            return [*data[:at], changed(data[at], draw), *data[at + 1 :]]
        key = draw(st.sampled_from(sorted(data)))
        return {**data, key: changed(data[key], draw)}
    return draw(st.sampled_from(CHANGES))(data, draw)


def _drop(data: Any, draw: Callable[..., Any]) -> Any:
    if isinstance(data, (list, dict)) and data:
        gone = draw(st.sampled_from(sorted(data) if isinstance(data, dict) else range(len(data))))
        if isinstance(data, dict):
            return {key: value for key, value in data.items() if key != gone}
        return [value for i, value in enumerate(data) if i != gone]
    return None


def _shuffle(data: Any, draw: Callable[..., Any]) -> Any:
    if isinstance(data, dict):
        return dict(draw(st.permutations(list(data.items()))))
    return draw(st.permutations(data)) if isinstance(data, list) else [data]


def _add(data: Any, draw: Callable[..., Any]) -> Any:
    word = draw(st.sampled_from(WORDS))
    if isinstance(data, dict):
        return {**data, word: draw(st.sampled_from([*data.values(), word, [], {}]))}
    if isinstance(data, list):
        at = draw(st.integers(0, len(data)))
        return [*data[:at], draw(st.sampled_from([*data, word])), *data[at:]]
    return word


def _wrap(data: Any, draw: Callable[..., Any]) -> Any:
    word = draw(st.sampled_from(("fuse", "kv", "field", "region", "key", "a")))
    return draw(st.sampled_from([[data], {word: data}, {word: [data]}, [[data], [data]]]))


def _replace(_: Any, draw: Callable[..., Any]) -> Any:
    values = [st.sampled_from(WORDS), st.integers(), st.booleans(), st.none(), st.text(max_size=5)]
    return draw(st.one_of(*values, st.floats(), st.dates(), st.just([]), st.just({})))


CHANGES = (_drop, _shuffle, _add, _wrap, _replace)


@st.composite
def changed_specs(draw: st.DrawFn) -> tuple[str, str]:
    name = draw(st.sampled_from(sorted(REAL)))
    data = yaml.safe_load(REAL[name])
    for _ in range(draw(st.integers(1, 3))):
        data = changed(data, draw)
    return name, yaml.safe_dump(data, allow_unicode=True, sort_keys=False)


@st.composite
def garbled_specs(draw: st.DrawFn) -> tuple[str, str]:
    name = draw(st.sampled_from(sorted(REAL)))
    text = REAL[name]
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(text)))
        stop = min(len(text), start + draw(st.integers(0, 6)))
        pieces = st.sampled_from([*WORDS, *"{}[]:,&*!|>'\"%@`#-?\n\t\\", "  ", ": ", "- ", "---\n"])
        text = text[:start] + draw(st.one_of(pieces, st.text(max_size=3))) + text[stop:]
    return name, text.encode("utf-8", "replace").decode()


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], list[str]]:
    """Checks one file among the chunk layouts, and with a sound layout where it is none itself."""

    def check(name: str, text: str) -> list[str]:
        folder = tmp_path_factory.mktemp("specs")
        files = {"layouts/NL_X_NB_BS_HS.yaml": LAYOUT} if not name.startswith("layouts/") else {}
        chunks = {one: text for one, text in REAL.items() if one.startswith("chunks/")}
        try:
            return faults(write(folder, {**chunks, **files, name: text}))
        finally:
            shutil.rmtree(folder)

    return check


@settings(max_examples=150)
@given(changed_specs())
def test_a_changed_spec_is_right_or_has_faults(
    alone: Callable[[str, str], list[str]], changed: tuple[str, str]
) -> None:
    sound(alone(*changed))


@settings(max_examples=150)
@given(garbled_specs())
def test_a_garbled_spec_is_right_or_has_faults(
    alone: Callable[[str, str], list[str]], garbled: tuple[str, str]
) -> None:
    sound(alone(*garbled))


def sound(lines: list[str]) -> None:
    for line in lines:
        assert MANUAL_LINE.fullmatch(line)
        assert "the proof fails" not in line
        assert "Input should" not in line


@pytest.fixture(scope="module")
def real() -> Specs:
    return load(specs_dir())


def test_the_real_specs_are_right(real: Specs) -> None:
    assert len(real.layouts) == len([name for name in REAL if name.startswith("layouts/")])
