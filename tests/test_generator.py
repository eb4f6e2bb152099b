"""The generator from outside: a copy of the checkout, a command, and what then lies on disk."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# What the generator needs of a checkout, and what it writes.
INPUTS = ("pyproject.toml", "codegen", "specs")
OUTPUTS = ("generated", "docs/layouts", "tests/goldens/layouts", "README.md")
# Layouts of the small project: one with kernels, one without.
SMALL = ("NL_X_NB_BS_HS", "NL_X_NB_BSV_BSS")
# What a checkout with nothing installed but the generator's own needs can't import.
ABSENT = ("torch", "numba", "numpy", "kvloom", "kvloom_generated")

PACKAGE = "generated/kvloom_generated"
MODULE = f"{PACKAGE}/nl_x_nb_bs_hs.py"
GOLDEN = "tests/goldens/layouts/NL_X_NB_BS_HS.txt"
README = "README.md"
ROW = "| 3 | [`NL_X_NB_BS_HS`]("

REPORT = re.compile(r"^(missing|stale|orphan): (\S+); mend it with: (.+)$", re.MULTILINE)


@dataclass(frozen=True)
class Result:
    """How a run of the generator ended, and what it said."""

    status: int
    out: str
    err: str


@dataclass(frozen=True)
class Project:
    """A copy of the checkout, which a test may damage."""

    root: Path

    def run(self, *arguments: str, **environment: str) -> Result:
        """``python -m kvloom_codegen`` from elsewhere, with only PYTHONPATH to find it."""
        elsewhere = self.root.parent / "elsewhere"
        for name in ABSENT:
            (elsewhere / name).mkdir(parents=True, exist_ok=True)
            text = f"raise ModuleNotFoundError('no module {name}')\n"
            (elsewhere / name / "__init__.py").write_text(text, encoding="utf-8")
        path = os.pathsep.join(map(str, (elsewhere, self.root / "codegen")))
        inherited = {name: value for name, value in os.environ.items() if name != "CI"}
        done = subprocess.run(
            [sys.executable, "-m", "kvloom_codegen", *arguments],
            cwd=elsewhere,
            env={**inherited, "PYTHONPATH": path, **environment},
            capture_output=True,
            text=True,
            encoding="utf-8",
            timeout=300,
            check=False,
        )
        return Result(done.returncode, done.stdout, done.stderr)

    def files(self) -> dict[str, bytes]:
        """Path → content of everything but the code that runs and what Python leaves behind."""
        return {
            path.relative_to(self.root).as_posix(): path.read_bytes()
            for path in sorted(self.root.rglob("*"))
            if path.is_file()
            and path.relative_to(self.root).parts[0] != "codegen"
            and "__pycache__" not in path.parts
        }

    def text(self, path: str) -> str:
        return (self.root / path).read_bytes().decode("utf-8")

    def put(self, path: str, text: str) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_bytes(text.encode("utf-8"))

    def edit(self, path: str, old: str, new: str) -> None:
        assert old in self.text(path)
        self.put(path, self.text(path).replace(old, new))

    def replace_by_folder(self, path: str) -> None:
        self.remove(path)
        (self.root / path).mkdir()

    def remove(self, path: str) -> None:
        (self.root / path).unlink()


def copy(source: Path, root: Path, parts: tuple[str, ...]) -> Project:
    """A project at ``root`` of these parts of ``source``."""
    for part in parts:
        target = root / part
        target.parent.mkdir(parents=True, exist_ok=True)
        if (source / part).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source / part, target, ignore=ignored)
        else:
            shutil.copy2(source / part, target)
    return Project(root)


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A small project, just generated; tests leave it as it is."""
    project = copy(ROOT, tmp_path_factory.mktemp("fresh") / "project", (*INPUTS, README))
    for path in (project.root / "specs/layouts").iterdir():
        if path.stem not in SMALL:
            path.unlink()
    assert project.run().status == 0
    return project


@pytest.fixture
def project(fresh: Project, tmp_path: Path) -> Project:
    """A small project, just generated."""
    return copy(fresh.root, tmp_path / "project", (*INPUTS, *OUTPUTS))


# --- what is written ------------------------------------------------------------------------------


def emptied(root: Path) -> Project:
    """All specs of the checkout, nothing generated, and no layout table in the README."""
    project = copy(ROOT, root, (*INPUTS, README))
    text = project.text(README)
    table = re.search(r"<!-- layouts: .* -->\n(.*)<!-- end of layouts -->", text, re.DOTALL)
    assert table
    project.put(README, text.replace(table[1], ""))
    return project


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Every output, written where nothing was; specs left out."""
    project = emptied(tmp_path_factory.mktemp("written") / "project")
    result = project.run(PYTHONHASHSEED="0")
    assert (result.status, result.err) == (0, "")
    return {path: held for path, held in project.files().items() if path.startswith(OUTPUTS)}


def test_what_is_checked_in_is_what_is_written_where_nothing_was(
    written: dict[str, bytes], tmp_path: Path
) -> None:
    checked_in = copy(ROOT, tmp_path / "checkout", OUTPUTS).files()
    assert sorted(written) == sorted(checked_in)
    assert [path for path in written if written[path] != checked_in[path]] == []


def test_hash_seed_locale_and_time_zone_change_no_byte(
    written: dict[str, bytes], tmp_path: Path
) -> None:
    project = emptied(tmp_path / "another" / "place")
    assert project.run(PYTHONHASHSEED="1", LC_ALL="C", TZ="Pacific/Apia").status == 0
    files = project.files()
    assert [path for path in written if files[path] != written[path]] == []


def test_outputs_end_their_lines_as_text_files_do(written: dict[str, bytes]) -> None:
    for path, held in written.items():
        assert b"\r" not in held, path
        assert held.endswith(b"\n") or not held, path
        assert not held.endswith(b"\n\n"), path
        assert not re.search(rb"[ \t]\n", held), path


def test_outputs_say_nothing_of_when_where_or_by_which_versions_they_were_made(
    written: dict[str, bytes],
) -> None:
    tools = ("jinja2", "pydantic", "pyyaml", "kvloom")
    versions = "|".join(re.escape(importlib.metadata.version(tool)) for tool in tools)
    told = re.compile(rf"\b20\d\d-\d\d\b|\d:\d\d:\d\d|\b({versions})\b|(?<![\w.)])/[a-z]+/[a-z]")
    for path, held in written.items():
        if path != README:  # which people write, but for its table
            assert not told.search(held.decode("utf-8")), path


def test_every_output_but_the_readme_says_from_what_and_how_it_was_made(
    written: dict[str, bytes],
) -> None:
    for path, held in written.items():
        if path.startswith((PACKAGE, "docs/")) and held:
            first, *_ = held.decode("utf-8").splitlines()
            assert re.search(r"Generated (from specs/\S* )?by `make generate`; do not edit", first)
    layout = written[MODULE].decode("utf-8")
    assert layout.startswith("# Generated from specs/layouts/NL_X_NB_BS_HS.yaml by ")


def test_root_and_specs_may_be_anywhere(fresh: Project, project: Project, tmp_path: Path) -> None:
    """Written to a root with no code, from specs with a layout less than the code's own."""
    target = copy(fresh.root, tmp_path / "target", (README,))
    specs = copy(fresh.root, tmp_path / "declared", ("specs",))
    for declared in (specs, project):
        declared.remove("specs/layouts/NL_X_NB_BSV_BSS.yaml")
    assert project.run().status == 0
    wanted = {path: held for path, held in project.files().items() if path.startswith(OUTPUTS)}
    options = ("--root", str(target.root), "--specs", str(specs.root / "specs"))
    assert fresh.run(*options).status == 0
    assert target.files() == wanted


# --- the three modes ------------------------------------------------------------------------------

PAGES = "docs/layouts"
STRAY = f"{PACKAGE}/stray.py"
NESTED = f"{PAGES}/old/layout.md"
# One of everything that can be wrong: what it is called, and what mends it.
DAMAGE = {
    MODULE: ("stale", "make generate"),
    f"{PAGES}/README.md": ("stale", "make generate"),
    README: ("stale", "make generate"),
    GOLDEN: ("stale", "make goldens"),
    f"{PACKAGE}/registry.py": ("missing", "make generate"),
    f"{PACKAGE}/py.typed": ("missing", "make generate"),
    "tests/goldens/layouts/NL_X_NB_BSV_BSS.txt": ("missing", "make generate"),
    STRAY: ("orphan", "make generate"),
    NESTED: ("orphan", "make generate"),
    "tests/goldens/layouts/GONE.txt": ("orphan", "make generate"),
}


@pytest.fixture
def damaged(project: Project) -> Project:
    """A project with all of ``DAMAGE``."""
    project.edit(MODULE, "layer * chunk_layer", "layer * chunk_token")
    project.edit(f"{PAGES}/README.md", "\n", "\r\n")
    project.edit(README, ROW, ROW.replace("3", "4"))
    project.edit(GOLDEN, "engine itemsize", "engine 2·itemsize")
    for path, (state, _) in DAMAGE.items():
        if state == "missing":
            project.remove(path)
        elif state == "orphan":
            project.put(path, "strange\nstray\n")
    return project


def reports(text: str) -> dict[str, tuple[str, str]]:
    """Path → (state, command) of every report in ``text``."""
    return {path: (state, command) for state, path, command in REPORT.findall(text)}


def changes(text: str, path: str) -> tuple[list[str], list[str]]:
    """The lines that a report's unified diff takes from a file, and those that it adds."""
    _, header, rest = text.partition(f"--- {path} (as it is)\n+++ {path} (as the specs ask)\n")
    assert header, f"no diff of {path}"
    diff = REPORT.split(rest)[0].splitlines()
    assert diff[0].startswith("@@ ")
    return tuple([line[1:] for line in diff if line.startswith(sign)] for sign in "-+")


def test_what_is_right_is_up_to_date(project: Project) -> None:
    result = project.run("--check")
    assert result == Result(0, "up to date: 2 layouts\n", "")
    assert project.run("--dry-run") == Result(0, "", "")
    assert project.run() == Result(0, "", "")


def test_check_tells_what_is_wrong_and_how_to_mend_it(damaged: Project) -> None:
    before = damaged.files()
    result = damaged.run("--check")
    assert result.status == 1
    assert reports(result.out) == DAMAGE
    assert result.out.endswith(f"\n{len(DAMAGE)} file(s) differ\n")
    assert damaged.files() == before


def test_check_shows_a_unified_diff_of_each(damaged: Project, fresh: Project) -> None:
    out = damaged.run("--check").out
    old, new = changes(out, MODULE)
    assert set(old) == {"            chunk_at_layer = chunk + layer * chunk_token"}
    assert set(new) == {"            chunk_at_layer = chunk + layer * chunk_layer"}
    registry = f"{PACKAGE}/registry.py"
    assert changes(out, registry) == ([], fresh.text(registry).splitlines())
    assert changes(out, STRAY) == (["strange", "stray"], [])


def test_a_dry_run_lists_and_writes_nothing(damaged: Project) -> None:
    before = damaged.files()
    result = damaged.run("--dry-run")
    assert result.status == 0
    said = {f"{state}: {path}" for path, (state, _) in DAMAGE.items()}
    assert set(result.out.splitlines()) == said
    assert damaged.files() == before


def test_writing_mends_all_but_a_golden_that_differs(damaged: Project, fresh: Project) -> None:
    differing = damaged.text(GOLDEN)
    result = damaged.run()
    assert result.status == 1
    said = {
        f"{'removed' if state == 'orphan' else 'wrote'} {path}"
        for path, (state, _) in DAMAGE.items()
        if path != GOLDEN
    }
    assert set(result.out.splitlines()) == said
    assert reports(result.err) == {GOLDEN: ("stale", "make goldens")}
    assert changes(result.err, GOLDEN)
    assert damaged.files() == {**fresh.files(), GOLDEN: differing.encode("utf-8")}
    assert not (damaged.root / NESTED).parent.exists()


@pytest.mark.parametrize("ci", ["", "0", "false"])
def test_goldens_are_renewed_on_request(damaged: Project, fresh: Project, ci: str) -> None:
    assert damaged.run("--update-goldens", CI=ci).status == 0
    assert damaged.files() == fresh.files()


@pytest.mark.parametrize(
    ("arguments", "environment", "says"),
    [
        (["--update-goldens"], {"CI": "true"}, "refused under CI"),
        (["--update-goldens"], {"CI": "1"}, "refused under CI"),
        (["--update-goldens", "--check"], {}, "goes with neither --check nor --dry-run"),
        (["--update-goldens", "--dry-run"], {}, "goes with neither --check nor --dry-run"),
        (["--check", "--dry-run"], {}, "not allowed with argument"),
    ],
)
def test_what_does_not_go_together_is_refused(
    damaged: Project, arguments: list[str], environment: dict[str, str], says: str
) -> None:
    before = damaged.files()
    result = damaged.run(*arguments, **environment)
    assert result.status == 2
    assert says in result.err
    assert damaged.files() == before


def test_outside_a_checkout_the_root_is_asked_for(project: Project) -> None:
    project.remove("pyproject.toml")
    result = project.run()
    assert result.status == 2
    assert "name the project's root with --root" in result.err


# --- what is left alone ---------------------------------------------------------------------------


def marks(project: Project) -> dict[str, tuple[int, int]]:
    """Path → inode and time of the last change; a file written anew has others."""
    stats = {path: (project.root / path).stat() for path in project.files()}
    return {path: (stat.st_ino, stat.st_mtime_ns) for path, stat in stats.items()}


def test_a_file_that_is_right_is_not_touched(project: Project) -> None:
    project.edit(MODULE, "layer * chunk_layer", "layer * chunk_token")
    before = marks(project)
    assert project.run().status == 0
    after = marks(project)
    assert [path for path in before if before[path] != after[path]] == [MODULE]


NOT_OURS = ["__pycache__/stray.pyc", ".registry.py.swp", "registry.py~", "../../docs/guide.md"]


@pytest.mark.parametrize("path", [f"{PACKAGE}/{name}" for name in NOT_OURS])
def test_caches_editors_files_and_other_folders_are_nobodys_orphans(
    project: Project, path: str
) -> None:
    project.put(path, "kept\n")
    assert project.run("--check").status == 0
    assert project.run() == Result(0, "", "")
    assert project.text(path) == "kept\n"


def test_an_editors_lock_on_a_file_is_no_file(project: Project) -> None:
    lock = project.root / PACKAGE / ".#registry.py"
    lock.symlink_to("nobody@nowhere:1")
    assert project.run("--check").status == 0
    assert lock.is_symlink()


def test_what_an_interrupted_run_left_behind_is_removed(project: Project) -> None:
    project.put(f"{PACKAGE}/.registry.py.new", "half")
    assert project.run().out == f"removed {PACKAGE}/.registry.py.new\n"


def test_a_diff_is_shown_where_only_ascii_can_be(project: Project) -> None:
    project.edit(MODULE, "engine → chunk", "engine ⇒ chunk")
    result = project.run("--check", PYTHONIOENCODING="ascii")
    assert result.status == 1
    assert "\\u21d2" in result.out


def test_the_readme_is_renewed_between_its_marks_alone(project: Project) -> None:
    project.put(README, f"Before.\n{project.text(README)}\nAfter, with no end of line.")
    wanted = project.text(README)
    project.edit(README, ROW, ROW.replace("3", "4"))
    assert project.run() == Result(0, f"wrote {README}\n", "")
    assert project.text(README) == wanted


# --- specs that come, go, or are wrong ------------------------------------------------------------


def test_what_a_spec_asked_for_goes_with_it(project: Project) -> None:
    project.remove("specs/layouts/NL_X_NB_BSV_BSS.yaml")
    assert project.run().status == 0
    left = project.files()
    assert [path for path in left if "nl_x_nb_bsv_bss" in path.lower()] == []
    assert [path for path in left if b"NL_X_NB_BSV_BSS" in left[path].upper()] == [
        "specs/README.md"
    ]


def test_a_new_spec_is_written_everywhere(project: Project, fresh: Project) -> None:
    name = "NL_X_NBBS_ONE_HS"
    shutil.copy(ROOT / f"specs/layouts/{name}.yaml", project.root / "specs/layouts")
    assert project.run().status == 0
    assert set(project.files()) - set(fresh.files()) == {
        f"specs/layouts/{name}.yaml",
        f"{PACKAGE}/{name.lower()}.py",
        f"{PAGES}/{name.lower()}.md",
        f"tests/goldens/layouts/{name}.txt",
    }
    for path in (README, f"{PAGES}/README.md", f"{PACKAGE}/registry.py"):
        assert name.lower() in project.text(path)


FAULTS: dict[str, Callable[[Project], None]] = {
    "specs/layouts/NL_X_NB_BS_HS.yaml:": lambda project: project.edit(
        "specs/layouts/NL_X_NB_BS_HS.yaml", "[block, token, elem]", "[block, tokn, elem]"
    ),
    "README.md:": lambda project: project.edit(README, "<!-- end of layouts -->", ""),
    f"{PACKAGE}/chunks.py:": lambda project: project.replace_by_folder(f"{PACKAGE}/chunks.py"),
}


@pytest.mark.parametrize("mode", [[], ["--update-goldens"], ["--check"], ["--dry-run"]], ids=str)
@pytest.mark.parametrize("place", FAULTS)
def test_nothing_is_written_where_an_input_is_wrong(
    damaged: Project, place: str, mode: list[str]
) -> None:
    FAULTS[place](damaged)
    before = damaged.files()
    result = damaged.run(*mode)
    assert (result.status, result.out) == (1, "")
    fault, last = result.err.splitlines()
    assert fault.startswith(place)
    assert last == "1 problem(s); nothing was written"
    assert damaged.files() == before
