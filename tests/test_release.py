"""scripts/release.py: nothing wrong is tagged, and what it writes is consistent."""

import datetime
from pathlib import Path

import pytest
import release

ROOT = Path(__file__).parents[1]
CHANGELOG = (
    "# Changelog\n\n## Not released yet\n\nNew:\n\n- A policy.\n\n## 0.1.0 (2026-01-01)\n\n- The first.\n"
)


@pytest.fixture
def repository(tmp_path, monkeypatch):
    for name, value in (("NAME", "Ann"), ("EMAIL", "ann@example.com")):
        monkeypatch.setenv(f"GIT_AUTHOR_{name}", value)
        monkeypatch.setenv(f"GIT_COMMITTER_{name}", value)
    made = release.Repository(tmp_path)
    for path in made.version_files:
        path.parent.mkdir(parents=True)
        path.write_text((ROOT / path.relative_to(tmp_path)).read_text())
    made.changelog.write_text(CHANGELOG)
    made.git("init", "--quiet")
    made.git("add", ".")
    made.git("commit", "--quiet", "-m", "first")
    made.git("tag", "v0.1.0")
    return made


def test_this_repository_states_one_version():
    from flexor.core.version import VERSION

    here = release.Repository(ROOT)
    assert here.version() == VERSION and "New:" in here.notes()


def test_a_release(repository):
    repository.check("0.2.0")
    notes = repository.notes()
    assert notes == "New:\n\n- A policy."
    repository.write("0.2.0", datetime.date(2026, 2, 3))
    repository.tag("0.2.0", notes)
    assert repository.version() == "0.2.0"
    assert "## Not released yet\n\n## 0.2.0 (2026-02-03)\n\nNew:" in repository.changelog.read_text()
    assert "- A policy." in repository.git("tag", "-n9", "--list", "v0.2.0")
    assert repository.git("status", "--porcelain") == ""


@pytest.mark.parametrize(
    ("version", "message"),
    [("0.2", "MAJOR.MINOR.PATCH"), ("0.1.0", "exists"), ("0.0.9", "not newer"), ("0.1.0rc1", "not newer")],
)
def test_a_wrong_version(repository, version, message):
    with pytest.raises(release.ReleaseError, match=message):
        repository.check(version)


def test_what_is_not_committed(repository):
    repository.changelog.write_text(CHANGELOG + "\n")
    with pytest.raises(release.ReleaseError, match=r"Commit these changes first:\nM CHANGELOG\.md"):
        repository.check("0.2.0")


def test_a_changelog_without_news(repository):
    repository.write("0.2.0", datetime.date(2026, 2, 3))
    repository.git("commit", "--quiet", "-am", "Version 0.2.0")
    with pytest.raises(release.ReleaseError, match="has nothing"):
        repository.check("0.3.0")


def test_versions_that_differ(repository):
    (path, *_) = repository.version_files
    path.write_text('VERSION = "0.1.1"\n')
    with pytest.raises(release.ReleaseError, match=r"different versions, 0\.1\.0 and 0\.1\.1"):
        repository.check("0.2.0")


def test_without_apply_nothing_is_changed(repository, monkeypatch, capsys):
    monkeypatch.setattr(release, "ROOT", repository.root)
    assert release.main(["0.2.0"]) == 0
    assert "- A policy." in capsys.readouterr().out
    assert repository.git("status", "--porcelain") == "" and repository.git("tag") == "v0.1.0"
    assert release.main(["0.1.0"]) == 1
    assert len(repository.git("log", "--oneline").splitlines()) == 1
