"""No file of the repository holds a secret."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SECRETS = {
    "private key": r"-----BEGIN [A-Z ]*PRIVATE KEY-----\s+[A-Za-z0-9+/]{40}",
    "key of a cloud": r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b",
    "token of a service": r"\b(?:gh[pousr]_[A-Za-z0-9]{36}|xox[abpr]-[A-Za-z0-9-]{20,}|sk_live_[A-Za-z0-9]{20,})",
    "key of ours": r"\bmr_[A-Za-z0-9]+_[A-Za-z0-9_-]{40,}",
    "password in an address": r"\b[a-z][a-z0-9+]{2,}://[^\s/:@'\"{}<>$]+:[^\s/:@'\"{}<>$]{6,}@(?!(?:127\.|localhost|host\b|example|db\b))",
}


def found(text: str) -> list[str]:
    """Kinds of secrets in a text."""
    return [kind for kind, pattern in SECRETS.items() if re.search(pattern, text)]


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("-----BEGIN RSA PRIVATE KEY-----\n" + "A" * 64, "private key"),
        ("AKIA" + "A1B2" * 4, "key of a cloud"),
        ("ghp_" + "a" * 36, "token of a service"),
        ("mr_a1b2_" + "x" * 43, "key of ours"),
        ("https://me:hunter22@registry.test/", "password in an address"),
    ],
)
def test_a_secret_is_found(text: str, kind: str) -> None:
    assert found(text) == [kind]


def test_no_file_holds_a_secret() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if listed.returncode:
        pytest.skip("this is no git checkout")
    own = Path(__file__).resolve()
    files = [ROOT / name for name in listed.stdout.decode().split("\0") if name]
    texts = {file: file.read_text(errors="replace") for file in files if file.is_file() and file != own}
    assert {str(file.relative_to(ROOT)): kinds for file, text in texts.items() if (kinds := found(text))} == {}
