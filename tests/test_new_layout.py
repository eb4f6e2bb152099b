"""One YAML file and one command add a layout: done in a copy of the checkout, and undone again."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("codegen", "generated", "runtime")
GENERATED = ("generated", "docs/layouts", "tests/goldens/layouts")
# Where the project's own tests of every layout are, and those that compare each with the oracle.
OWN_TESTS = {"bind", "generated", "goldens", "proof"}
ORACLE_TESTS = {"oracle_agrees", "transfer_rules", "transfers"}
MANUAL = (ROOT / "specs/README.md").read_text(encoding="utf-8")


@dataclass(frozen=True)
class Example:
    """A layout to add, and the shape of one of its tensors.

    ``axes`` are those of an array that holds a whole cache, outermost first; its tensors are that
    array's layers. ``complaints`` are the tests that fail until more than the one file is written.
    """

    spec: str
    shape: str
    axes: str
    complaints: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        name: str = yaml.safe_load(self.spec)["layout"]
        return name

    @property
    def alias(self) -> str:
        alias: str = yaml.safe_load(self.spec)["engines"][0]["alias"]
        return alias

    @property
    def file(self) -> str:
        return f"specs/layouts/{self.name}.yaml"

    @property
    def outputs(self) -> dict[str, str]:
        """The generated files that must change, and how git calls the change."""
        return {
            "README.md": "M",
            "docs/layouts/README.md": "M",
            "generated/kvloom_generated/registry.py": "M",
            f"docs/layouts/{self.name.lower()}.md": "??",
            f"generated/kvloom_generated/{self.name.lower()}.py": "??",
            f"tests/goldens/layouts/{self.name}.txt": "??",
        }


def manuals_example() -> str:
    """The layout that the manual adds, as it is printed there."""
    ((stem, spec),) = re.findall(
        r"Write\s+`layouts/(\w+)\.yaml`:\n\n```yaml\n(.*?)```", MANUAL, re.S
    )
    assert spec.startswith(f"layout: {stem}\n")
    return spec


EXAMPLES = {
    "of the manual": Example(
        spec=manuals_example(),
        shape="[NH, NB, 2, BS, HS]",
        axes="layer head block kv token elem",
    ),
    "without a name in the grammar": Example(
        spec="""\
layout: EXAMPLE_VIEWS_BY_PLANE
attention: mha
engines:
  - {name: Example of views, alias: example-views}
doc: One buffer, of which each layer is a strided view; the K of all layers lies before their V.
lists: [layer]
memory: [block, kv, layer, token, head, elem]
views: [layer]
chunk: two_plane
""",
        shape="[NB, 2, BS, NH, HS]",
        axes="block kv layer token head elem",
        complaints=frozenset({"test_the_oracle_knows_every_layout"}),
    ),
}


@dataclass(frozen=True)
class Checkout:
    """A copy of the checkout, under a git of its own."""

    root: Path

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run ``command`` at the root; Python finds the copy's packages before any installed."""
        path = os.pathsep.join(str(self.root / package) for package in PACKAGES)
        own = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1", "PYTHONPATH": path}
        kept = {name: held for name, held in os.environ.items() if not name.startswith("GIT_")}
        return subprocess.run(
            command,
            cwd=self.root,
            env={**kept, **own},
            capture_output=True,
            text=True,
            encoding="utf-8",
            timeout=600,
            check=False,
        )

    def says(self, *command: str) -> str:
        """What ``command``, which must succeed, prints."""
        done = self.run(*command)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def python(self, *arguments: str) -> str:
        return self.says(sys.executable, *arguments)

    def generate(self) -> str:
        return self.python("-m", "kvloom_codegen")

    def git(self, *arguments: str) -> str:
        someone = ("-c", "user.name=Someone", "-c", "user.email=someone@example.com")
        return self.says("git", *someone, *arguments)

    def changed(self, *options: str) -> dict[str, str]:
        """Path → state of what ``git status`` shows."""
        lines = self.git("status", "--porcelain", "--untracked-files=all", *options).splitlines()
        return {line[3:]: line[:2].strip() for line in lines}

    def files(self) -> dict[str, tuple[int, bytes]]:
        """Path → mode and content of everything, folders too, but for git and Python's caches."""
        found = {}
        for path in sorted(self.root.rglob("*")):
            parts = path.relative_to(self.root).parts
            if ".git" not in parts and "__pycache__" not in parts:
                held = b"" if path.is_dir() else path.read_bytes()
                found["/".join(parts)] = (path.stat().st_mode, held)
        return found


def copy(root: Path) -> Checkout:
    """A copy of everything that git has or would take, committed, without the examples.

    Somebody who tried the manual's example may have it in the checkout.
    """
    command = ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for path in filter(None, listed.split("\0")):
        if (ROOT / path).is_file():
            target = root / path
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / path, target)
    made = Checkout(root)
    there = [root / one.file for one in EXAMPLES.values() if (root / one.file).exists()]
    for path in there:
        path.unlink()
    if there:
        made.generate()
    made.git("init", "--quiet")
    made.git("add", "--all")
    made.git("commit", "--quiet", "--message", "As it is")
    return made


def add(checkout: Checkout, example: Example) -> str:
    """Do what the manual says; what the command printed."""
    assert not (checkout.root / example.file).exists()
    (checkout.root / example.file).write_text(example.spec, encoding="utf-8")
    return checkout.generate()


# --- a layout is added ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Added:
    """A copy of the checkout with one more layout; tests leave it as it is."""

    checkout: Checkout
    example: Example
    printed: str


@pytest.fixture(scope="module", params=EXAMPLES.values(), ids=EXAMPLES)
def added(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Added:
    example: Example = request.param
    checkout = copy(tmp_path_factory.mktemp("added") / "kvloom")
    return Added(checkout, example, add(checkout, example))


def test_the_command_writes_what_follows_from_the_file_and_nothing_else(added: Added) -> None:
    outputs = added.example.outputs
    assert added.checkout.changed() == {**outputs, added.example.file: "??"}
    assert set(added.printed.splitlines()) == {f"wrote {path}" for path in outputs}


def test_all_is_up_to_date_afterwards(added: Added) -> None:
    assert added.checkout.python("-m", "kvloom_codegen", "--check").startswith("up to date: ")


def test_the_readme_gains_the_layouts_row(added: Added) -> None:
    name, page = added.example.name, f"docs/layouts/{added.example.name.lower()}.md"
    held_by = yaml.safe_load(added.example.spec)["engines"][0]["name"]
    diff = added.checkout.git("diff", "--unified=0", "README.md").splitlines()
    changes = [line for line in diff if re.match(r"[+-](?![+-]{2} )", line)]
    assert changes == [f"+|  | [`{name}`]({page}) | `{added.example.shape}` | {held_by} | CPU |"]


MOVES = """
import sys
from pathlib import Path
import torch
import kvloom, kvloom_codegen, kvloom_generated

alias, name, *axes = sys.argv[1:]
for package in (kvloom, kvloom_codegen, kvloom_generated):
    assert Path(package.__file__).is_relative_to(Path.cwd()), package.__file__

sizes = {"layer": 3, "kv": 2, "block": 7, "token": 4, "head": 5, "elem": 6}
slots = [26, 0, 5, 27, 12, 13]

def planes(whole):
    order = [axes.index(axis) for axis in "kv layer block token head elem".split()]
    return whole.permute(order).reshape(2, 3, 7 * 4, 5 * 6)

def bind(whole):
    return layout.bind(list(whole.unbind(axes.index("layer"))))

layout = kvloom.layout(alias)
assert layout is kvloom.layout(name)
source = torch.randint(1, 1 << 30, [sizes[axis] for axis in axes], dtype=torch.int32)
target = torch.zeros_like(source)
chunk = bind(source).gather(slots=slots)
assert torch.equal(chunk, planes(source)[:, :, slots])
bind(target).scatter(chunk, slots=slots)
assert torch.equal(planes(target)[:, :, slots], chunk)
assert target.count_nonzero() == chunk.numel()
print("moved")
"""


def test_kvloom_finds_it_and_moves_its_tokens(added: Added) -> None:
    example = added.example
    arguments = (example.alias, example.name, *example.axes.split())
    assert added.checkout.python("-c", MOVES, *arguments) == "moved\n"


def test_the_manual_calls_its_example_by_its_alias() -> None:
    assert f'`kvloom.layout("{EXAMPLES["of the manual"].alias}")`' in MANUAL


def test_the_demo_runs_it(added: Added) -> None:
    small = ("--cache-mib", "8", "--blocks", "32")
    said = added.checkout.python("examples/demo.py", "--layout", added.example.alias, *small)
    assert added.example.name in said
    assert re.search(r"^PASS: 1 layout", said, re.MULTILINE)


def test_the_projects_own_tests_run_it(added: Added) -> None:
    """With no other edit, and all pass; where no name says the layout, one test asks for more."""
    done = added.checkout.run(
        *(sys.executable, "-m", "pytest", "-q", "-r", "pfE"),
        *("-k", f"{added.example.name} or test_the_oracle_knows_every_layout"),
        # This file's own copies of the layout are elsewhere.
        *("tests", "--ignore", f"tests/{Path(__file__).name}"),
    )
    outcomes = re.findall(r"^(PASSED|FAILED|ERROR) tests/test_(\w+)\.py::(\w+)", done.stdout, re.M)
    unhappy = {test for outcome, _, test in outcomes if outcome != "PASSED"}
    assert unhappy == added.example.complaints, done.stdout
    assert done.returncode == bool(unhappy), done.stdout + done.stderr
    if unhappy:
        assert f"['{added.example.name}']" in done.stdout
        assert "each needs an entry in HAND_WRITTEN, oracle.py" in done.stdout
    ran = {file for _, file, _ in outcomes}
    assert ran >= (OWN_TESTS if unhappy else OWN_TESTS | ORACLE_TESTS)


# --- and removed, and all written anew ------------------------------------------------------------


def test_without_the_file_the_command_removes_all_that_followed(tmp_path: Path) -> None:
    checkout, example = copy(tmp_path / "kvloom"), EXAMPLES["of the manual"]
    before = checkout.files()
    add(checkout, example)
    assert checkout.files() != before
    (checkout.root / example.file).unlink()
    printed = checkout.generate().splitlines()
    removed = {path for path, state in example.outputs.items() if state == "??"}
    assert {line for line in printed if line.startswith("removed ")} == {
        f"removed {path}" for path in removed
    }
    assert checkout.files() == before


def test_git_sees_no_change_where_what_is_generated_was_deleted_and_is_written_again(
    tmp_path: Path,
) -> None:
    """Neither in content nor in mode, and .gitignore keeps no output out of a commit."""
    copy(tmp_path / "kvloom").git("clone", "--quiet", ".", str(tmp_path / "clone"))
    clone = Checkout(tmp_path / "clone")
    tracked = clone.git("ls-files", *GENERATED).splitlines()
    for folder in GENERATED:
        shutil.rmtree(clone.root / folder)
    assert set(clone.generate().splitlines()) == {f"wrote {path}" for path in tracked}
    seen = clone.changed("--ignored")
    assert [path for path in seen if "__pycache__" not in path] == []
