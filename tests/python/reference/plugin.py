"""pytest plugin that runs the reference's own tests against morphkv.mlx.

The reference's factory imports the class of a method by name from a module; there our class takes
the place of theirs before any test module is imported. Their files are neither edited nor copied.
The run fails when a case is skipped or when fewer ran than the pinned release has.
"""

import inspect

import pytest

# Cases of the pinned release whose name, or file's name, holds "morphkv".
EXPECTED = {
    "test_deferred_eviction_contract.py": 5,
    "test_eviction_rope_contract.py": 9,
    "test_issue_83_state_writethrough.py": 7,
    "test_morphkv_cache.py": 14,
    "test_output_dtype_follows_input.py": 1,
}

passed: dict[str, int] = {}
skipped: list[str] = []


def pytest_configure(config: pytest.Config) -> None:
    import veloxquant_mlx.cache.morphkv_cache as theirs
    from veloxquant_mlx.cache.base import KVCacheConfig, KVCacheFactory

    import morphkv.mlx

    theirs.MorphKVKVCache = morphkv.mlx.MorphKVKVCache
    made = KVCacheFactory.create(KVCacheConfig(method="morphkv"))
    if type(made) is not morphkv.mlx.MorphKVKVCache:
        raise pytest.UsageError(f"the reference's factory makes {inspect.getfile(type(made))}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Selects the cases of this method; -k would also match folders of that name."""
    others = [i for i in items if "morphkv" not in i.name and "morphkv" not in i.path.name]
    config.hook.pytest_deselected(items=others)
    items[:] = [i for i in items if i not in others]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    file = report.nodeid.split("::")[0].rsplit("/", 1)[-1]
    if report.skipped:
        skipped.append(report.nodeid)
    elif report.when == "call" and report.passed:
        passed[file] = passed.get(file, 0) + 1


def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.exitstatus == 0 and (passed != EXPECTED or skipped):
        session.exitstatus = 1


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.section("the reference's cases against morphkv.mlx.MorphKVKVCache")
    for file in sorted(EXPECTED):
        terminalreporter.line(f"{file}: {passed.get(file, 0)} of {EXPECTED[file]} passed")
    total = sum(passed.values())
    terminalreporter.line(
        f"in all {total} of {sum(EXPECTED.values())} passed, {len(skipped)} skipped"
    )
