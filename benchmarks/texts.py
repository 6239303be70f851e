"""Long public-domain English: Jane Austen's six novels, and the Jargon File.

Debian carries both. They are fetched through apt from the machine's own mirror, unpacked without being installed, and
kept in the user's cache directory. What is checked is the text itself, so a repackaged .deb gives the same figures or
an error.

    python -m benchmarks.texts            # fetch all and list them
"""

from __future__ import annotations

import gzip
import hashlib
import os
import shutil
import subprocess
import tempfile
import zlib
from dataclasses import dataclass
from pathlib import Path

AUSTEN = "r-cran-janeaustenr"
JARGON = "jargon-text"

#: Where apt keeps what `apt-get update` brought.
_LISTS = Path("/var/lib/apt/lists")
_RDATA = "usr/lib/R/site-library/janeaustenr/data/Rdata"
_JARGON_FILE = "usr/share/doc/jargon-text/jargon.txt.gz"


class TextError(Exception):
    """A text cannot be had, or is not the one that the published figures were taken on."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where a text is and what it must be: sha256 of its UTF-8 bytes."""

    package: str
    sha256: str


TEXTS = {
    "emma": Source(AUSTEN, "7c67b5985c6d0de1efaeb5d342d52cb82c38083c40e2295129e30e87ee690ebe"),
    "mansfieldpark": Source(AUSTEN, "98bc90519cdf4ef663ad7de2734bb529435ef24f7abbde6bb1a50898871dafe9"),
    "northangerabbey": Source(AUSTEN, "51f91bbe0517db8e65cff009b097ce0a1836124c4e0532ac19e6c0cad982abed"),
    "persuasion": Source(AUSTEN, "8061549557aebd2fd6e353d18d9197cb707029112bd52d4d8b174583a925848a"),
    "prideprejudice": Source(AUSTEN, "dfc684d4f857fa938268f9ab9c5567b64bd0691251eca959644adeabe6287a4d"),
    "sensesensibility": Source(AUSTEN, "105e1651fe93bed7130078578efd31e0c557d68667ba672ddc876f735b30fe09"),
    "jargon": Source(JARGON, "40dfb4b98191a670a09a183d5798d50f243d23fdbd1495dcc0aca2ce5895ba97"),
}


def cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "octavo" / "texts"


def load_text(name: str) -> str:
    """The text called `name` (a key of TEXTS), fetched on first use. Raises TextError."""
    try:
        source = TEXTS[name]
    except KeyError:
        raise TextError(f"no text is called {name!r}; there are {', '.join(TEXTS)}") from None
    path = cache_dir() / f"{name}.txt"
    if path.exists() and _digest(path.read_bytes()) == source.sha256:
        return path.read_text(encoding="utf-8")
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as work:
        found = _unpack(source.package, _download(source.package, Path(work)), Path(work))
    for found_name, text in found.items():
        data = text.encode()
        expected = TEXTS[found_name].sha256
        if _digest(data) != expected:
            raise TextError(
                f"{found_name!r} from the Debian package {source.package} has sha256 {_digest(data)}, not {expected}: "
                f"another edition, on which the published figures do not hold"
            )
        partial = path.with_name(f"{found_name}.txt.partial")
        partial.write_bytes(data)
        partial.replace(path.with_name(f"{found_name}.txt"))
    return path.read_text(encoding="utf-8")


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _download(package: str, folder: Path) -> Path:
    for tool in ("apt-get", "dpkg"):
        if shutil.which(tool) is None:
            raise TextError(f"the Debian package {package} is fetched with {tool}, which this machine does not have")
    if not any(_LISTS.glob("*_Packages*")):
        _apt(package, ["update"], folder)
    _apt(package, ["download", package], folder)
    debs = list(folder.glob(f"{package}_*.deb"))
    if len(debs) != 1:
        raise TextError(f"apt-get download {package} left {len(debs)} packages, expected 1")
    return debs[0]


def _apt(package: str, arguments: list[str], folder: Path) -> None:
    done = subprocess.run(["apt-get", "-q", *arguments], cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise TextError(
            f"cannot fetch the Debian package {package} ('apt-get {' '.join(arguments)}' failed): "
            f"{done.stderr.strip() or done.stdout.strip()}\n"
            f"The benchmarks need a configured Debian mirror; by hand: put the package's texts into {cache_dir()}"
        )


def _unpack(package: str, deb: Path, folder: Path) -> dict[str, str]:
    """Name -> text of all that a package holds."""
    root = folder / "root"
    subprocess.run(["dpkg", "-x", deb, root], check=True)
    if package == JARGON:
        return {"jargon": gzip.decompress((root / _JARGON_FILE).read_bytes()).decode("utf-8")}
    return _read_lazy_load(root / f"{_RDATA}.rdx", (root / f"{_RDATA}.rdb").read_bytes())


def _read_lazy_load(index_file: Path, data: bytes) -> dict[str, str]:
    """Character vectors of an R lazy-load database, their elements joined as lines.

    The index is a compressed RDS list of name -> (offset, length); a record is its size in four bytes, big-endian, and
    a zlib stream of one RDS object.
    """
    try:
        from rdata.conversion import convert
        from rdata.parser import parse_data
    except ImportError as error:
        raise TextError(f"the novels are R data ({error}); install the reader: pip install -e '.[bench]'") from error

    def read(raw: bytes) -> object:
        return convert(parse_data(raw, extension=".rds"))

    index = read(gzip.decompress(index_file.read_bytes()))
    texts = {}
    for name, (offset, length) in index["variables"].items():  # type: ignore[index]
        lines = read(zlib.decompress(data[offset + 4 : offset + length]))
        texts[str(name)] = "\n".join(str(line) for line in lines) + "\n"  # type: ignore[attr-defined]
    return texts


def main() -> None:
    for name, source in TEXTS.items():
        print(f"{name:18} {len(load_text(name)):>9,} characters, from {source.package}")


if __name__ == "__main__":
    main()
