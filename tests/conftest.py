"""Options, fixtures and hypothesis profiles of the whole suite."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

# Has LMCache on its path, and is run by a call of pytest of its own, after the one for all else.
collect_ignore = ["integration"]

IN_CI = os.environ.get("CI", "").lower() not in ("", "0", "false", "no")

# Times say nothing on a busy machine: the first example of a test may compile a kernel.
settings.register_profile("dev", deadline=None, suppress_health_check=[HealthCheck.too_slow])
# A change must not fail because of examples that an earlier run did not draw.
settings.register_profile(
    "ci", settings.get_profile("dev"), derandomize=True, database=None, print_blob=True
)
settings.load_profile("ci" if IN_CI else "dev")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-goldens",
        action="store_true",
        help="write what the code says now over the files in tests/goldens (refused under CI)",
    )


def pytest_configure(config: pytest.Config) -> None:
    if IN_CI and config.getoption("--update-goldens"):
        raise pytest.UsageError(
            "--update-goldens is refused under CI (the variable CI is set): goldens are updated "
            "by a person, who reads the diff"
        )


@pytest.fixture(scope="session")
def update_goldens(request: pytest.FixtureRequest) -> bool:
    """Whether goldens that differ are to be written anew."""
    return bool(request.config.getoption("--update-goldens"))
