"""The commit that a number comes from."""

import subprocess

from sightline.measure.provenance import commit_of


def test_commit(tmp_path):
    package = tmp_path / "repository/package"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    assert commit_of(package) == {"id": "unknown", "dirty": False}

    def git(*arguments):
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        done = subprocess.run(["git", "-C", package, *identity, *arguments], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    git("init", "-q")
    assert commit_of(package)["id"] == "unknown"  # somebody else's checkout: we are not part of it
    git("add", ".")
    git("commit", "-qm", "first")
    assert commit_of(package) == {"id": git("rev-parse", "HEAD"), "dirty": False}
    (package / "__init__.py").write_text("x = 1\n")
    assert commit_of(package)["dirty"]
