"""Build the stand-ins for CUDA and NCCL for the installed torch, and cache them.

Three libraries are implemented: ``libcudart``, ``libcuda`` and ``libnccl``. The other libraries of
NVIDIA that torch links (cuBLAS, cuDNN, NVSHMEM, ...) are stubs: they define the symbols that torch
imports. A stub prints its name on stderr and returns an error.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...errors import ReloadpgError

SOURCES = Path(__file__).parent
REAL = {  # library: source files, and the error that its stubs return
    "libcudart": (("cuda_runtime.cpp", "cuda_nccl.cpp"), 801),  # cudaErrorNotSupported
    "libcuda": (("cuda_driver.cpp",), 801),  # CUDA_ERROR_NOT_SUPPORTED
    "libnccl": (("nccl.cpp",), 5),  # ncclInvalidUsage
}
NVML = "libnvidia-ml.so.1"
"""The library that NVIDIA's host code of NCCL opens by name; torch does not link it."""
UNSUPPORTED = 1
"""The value that stubs of other libraries return: an error in each of them."""

_SYSTEM = re.compile(
    r"(libc|libm|libdl|librt|libpthread|libgcc_s|libstdc\+\+|ld-linux.*|libgomp|libgfortran"
    r"|libquadmath|libc10.*|libtorch.*|libshm)\.so"
)
_OWNERS = (  # the library of a symbol without a version, by the symbol's name
    ("libnccl", r"p?nccl"),
    ("libcufile", r"cuFile"),
    ("libcurand", r"curand"),
    ("libcusparseLt", r"cusparseLt"),
    ("libcusparse", r"cusparse"),
    ("libnvrtc", r"nvrtc"),
    ("libnvJitLink", r"(__)?nvJitLink"),
    ("libcublasLt", r"cublasLt"),
    ("libcublas", r"cublas"),
    ("libcufft", r"cufft"),
    ("libcudnn", r"cudnn"),
    ("libcusolver", r"cusolver"),
    ("libcupti", r"cupti"),
    ("libcudart", r"(__)?cuda"),
    ("libcuda", r"cu[A-Z]"),
    ("libnvshmem_host", r".*nvshmem"),
)
_STUB_CALLED = """
#include <stdio.h>
#include <unistd.h>
static long called(const char* name) {
  static const char* last;
  if (last != name) fprintf(stderr,
      "reloadpg stand-ins: %s of LIBRARY is not implemented; it returns an error (process %d)\\n",
      name, (int)getpid());
  last = name;
  return RESULT;
}
"""


class StandinsError(ReloadpgError, RuntimeError):
    """The stand-ins for CUDA and NCCL cannot be built or used; the message says what is missing."""


def build() -> Path:
    """Return the folder with the libraries for the installed torch; build them if needed.

    Local, idempotent; takes 10 to 60 s the first time. The folder is in
    ``$XDG_CACHE_HOME/reloadpg/standins``. Its name contains a hash of the sources, torch's
    libraries and the compiler. Processes that build at the same time wait for each other.

    Raises:
        StandinsError: the system is not Linux on x86_64, torch is a CPU build, or a program (g++,
            nm, readelf) is missing or fails.
    """
    torch = _Torch.installed()
    compiler = _compiler()
    cache = _cache()
    target = cache / f"torch-{torch.version}-{_digest(torch, compiler)}"
    if target.is_dir():
        return target
    with _locked(cache / f"{target.name}.lock"):
        if not target.is_dir():
            made = cache / f"building-{target.name}"
            shutil.rmtree(made, ignore_errors=True)  # of a build that was killed
            made.mkdir(mode=0o700)
            try:
                _Builder(torch, made).run()
                _write_entry_point(made)
                made.rename(target)
            finally:
                shutil.rmtree(made, ignore_errors=True)
    return target


def _write_entry_point(folder: Path) -> None:
    """Let torch's import find :func:`.activate`, in processes that have the folder on their path.

    It is not one of the installed package: torch would call that in each process.
    """
    package = folder / "reloadpg_standins-0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: reloadpg-standins\nVersion: 0\n"
    )
    (package / "entry_points.txt").write_text(
        "[torch.backends]\nreloadpg_standins = reloadpg.testing.standins:activate\n"
    )


def check_nccl(path: str | os.PathLike[str]) -> str:
    """Return the absolute path of an NCCL library whose host code can run here. Local.

    Raises:
        StandinsError: it is not a library, or not linked to a dynamic CUDA runtime.
    """
    nothing = "nothing was started. Give the file of an NCCL built from NVIDIA's source and linked"
    file = Path(path).absolute()
    if not file.is_file():
        raise StandinsError(f"RELOADPG_NCCL: {file} is not a file; {nothing} to libcudart.so")
    needed = re.findall(r"NEEDED.*\[(.*?)\]", _output("readelf", "-dW", str(file)))
    runtimes = [name for name in needed if name.startswith("libcudart.so.")]
    names = (build() / "libraries").read_text().split()
    wanted = next(name for name in names if name.startswith("libcudart.so."))
    if runtimes != [wanted]:
        has = f"is linked to {runtimes[0]}" if runtimes else "contains a static CUDA runtime"
        raise StandinsError(f"RELOADPG_NCCL: {file} {has}; {nothing} to {wanted}, as torch is.")
    return str(file)


@dataclass(frozen=True)
class _Torch:
    """The installed torch, found without importing it: its import needs the libraries."""

    version: str
    libraries: Path
    digest: str
    nccl: int

    @classmethod
    def installed(cls) -> _Torch:
        if sys.platform != "linux" or platform.machine() != "x86_64":
            raise StandinsError(
                "the stand-ins for CUDA and NCCL need Linux on x86_64, but this system is "
                f"{sys.platform} on {platform.machine()}; nothing was built"
            )
        spec: Any = importlib.util.find_spec("torch")
        libraries = Path(spec.origin).parent / "lib"
        version = importlib.metadata.version("torch")
        if not (libraries / "libtorch_cuda.so").is_file():
            plain = version.partition("+")[0]
            raise StandinsError(
                f"torch {version} is a build without CUDA, and the stand-ins for CUDA and NCCL "
                f"run the CUDA build; nothing was built. Install torch=={plain} from PyPI, in a "
                f"separate venv if you like: pip install --no-deps torch=={plain} "
                "(NVIDIA's packages, which it requires, are not needed)"
            )
        sizes = (f"{path.name} {path.stat().st_size}" for path in sorted(libraries.glob("*.so")))
        return cls(version, libraries, "\n".join(sizes), _nccl_version())


def _nccl_version() -> int:
    """The version code of the NCCL that this torch requires, such as 22703 for 2.27.3."""
    for line in importlib.metadata.requires("torch") or ():
        found = re.match(r"nvidia-nccl-cu\d+\s*==\s*(\d+)\.(\d+)\.(\d+)", line)
        if found:
            major, minor, patch = map(int, found.groups())
            return major * 10000 + minor * 100 + patch
    return 22703


def _compiler() -> str:
    for program, package in (("g++", "g++"), ("nm", "binutils"), ("readelf", "binutils")):
        if shutil.which(program) is None:
            raise StandinsError(
                f"the stand-ins for CUDA and NCCL are compiled when they are first used, and "
                f"{program} was not found; nothing was built. Install it (on Debian: "
                f"apt-get install {package})."
            )
    return _output("g++", "--version").partition("\n")[0]


def _digest(torch: _Torch, compiler: str) -> str:
    digest = hashlib.sha256()
    for path in (*sorted(SOURCES.glob("*.cpp")), *sorted(SOURCES.glob("*.h")), Path(__file__)):
        digest.update(path.read_bytes())
    digest.update(f"{torch.version} {torch.digest} {torch.nccl} {compiler}".encode())
    return digest.hexdigest()[:16]


def _cache() -> Path:
    """The folder of all builds."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    path = Path(base, "reloadpg", "standins").absolute()
    if re.search(r"[\s:]", str(path)):
        raise StandinsError(
            f"the cache folder {str(path)!r} has a space or a colon in its name, which LD_PRELOAD "
            "cannot hold; nothing was built. Set XDG_CACHE_HOME to another folder."
        )
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    # The file is kept. If it were removed, a process that waits for it and one that creates a new
    # file could both hold a lock.


def _output(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, env=_plain_environment())
    if done.returncode:
        words = " ".join(command)
        raise StandinsError(
            f"a command of the build of the stand-ins failed with exit code {done.returncode}; "
            f"nothing was kept: {words}\n{done.stderr[-4000:]}"
        )
    return done.stdout


def _plain_environment() -> dict[str, str]:
    return {**{k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}, "LC_ALL": "C"}


# ---------------------------------------------------------------------------------------------
# the dependencies of torch's libraries


@dataclass
class _Needs:
    """The libraries and symbols that torch's libraries need and torch does not contain.

    Attributes:
        libraries: names of the libraries, such as libcudart.so.13.
        symbols: by library, each symbol with its version, or with "".
    """

    libraries: set[str] = field(default_factory=set)
    symbols: dict[str, set[tuple[str, str]]] = field(default_factory=lambda: defaultdict(set))


def _needs(libraries: Path) -> _Needs:
    needs = _Needs()
    unversioned: set[str] = set()
    defined: set[str] = set()
    for library in map(str, sorted(libraries.glob("*.so"))):
        needed = re.findall(r"NEEDED.*\[(.*?)\]", _output("readelf", "-dW", library))
        needs.libraries.update(name for name in needed if not _SYSTEM.match(name))
        owner_of, owner = {}, ""
        for line in _output("readelf", "-VW", library).splitlines():
            if found := re.search(r"Version: 1  File: (\S+)", line):
                owner = found[1]
            elif found := re.search(r"Name: (\S+)", line):
                owner_of[found[1]] = owner
        for line in _output("nm", "-D", "--undefined-only", library).splitlines():
            name, _, version = line.split()[-1].partition("@")
            if version:
                needs.symbols[owner_of.get(version.lstrip("@"), "")].add(
                    (name, version.lstrip("@"))
                )
            elif line.split()[-2] == "U":
                unversioned.add(name)
        lines = _output("nm", "-D", "--defined-only", library).splitlines()
        defined.update(line.split()[-1].partition("@")[0] for line in lines)
    by_stem = {name.partition(".so")[0]: name for name in needs.libraries}
    for symbol in unversioned - defined:
        for stem, pattern in _OWNERS:
            if stem in by_stem and re.match(pattern, symbol):
                needs.symbols[by_stem[stem]].add((symbol, ""))
                break
    return needs


# ---------------------------------------------------------------------------------------------
# libraries


class _Builder:
    def __init__(self, torch: _Torch, out: Path) -> None:
        self._torch = torch
        self._out = out

    def run(self) -> None:
        needs = _needs(self._torch.libraries)
        runtime = next((n for n in needs.libraries if n.startswith("libcudart.so.")), "")
        major = runtime.rpartition(".")[2]
        if major not in ("12", "13"):
            raise StandinsError(
                f"torch {self._torch.version} needs {runtime or 'no libcudart'}; the stand-ins "
                "know CUDA 12 and 13. Nothing was built."
            )
        settings = (f"-DCUDART_MAJOR={major}", f"-DNCCL_VERSION_CODE={self._torch.nccl}")
        objects = self._compile(settings)
        stems = {name: name.partition(".so")[0] for name in needs.libraries}
        # The runtime comes first: libcuda and libnccl are linked against it.
        for name in sorted(needs.libraries, key=lambda name: (name != runtime, name)):
            sources, result = REAL.get(stems[name], ((), UNSUPPORTED))
            symbols = needs.symbols.get(name, set())
            self._link(name, symbols, result, [objects[source] for source in sources], runtime)
        shared = ["g++", "-shared", "-o", str(self._out / NVML), f"-Wl,-soname,{NVML}"]
        _output(*shared, str(objects["nvml.cpp"]), *self._runtime(runtime))
        order = sorted(needs.libraries, key=lambda name: (stems[name] not in REAL, name != runtime))
        (self._out / "libraries").write_text("\n".join(order))

    def _compile(self, settings: Sequence[str]) -> Mapping[str, Path]:
        flags = ("-std=c++17", "-O2", "-fPIC", "-fvisibility=hidden", "-pthread", *settings)

        def compiled(source: str) -> Path:
            target = self._out / f"{source}.o"
            _output("g++", *flags, "-c", str(SOURCES / source), "-o", str(target))
            return target

        sources = [source for several, _ in REAL.values() for source in several] + ["nvml.cpp"]
        with ThreadPoolExecutor() as pool:
            return dict(zip(sources, pool.map(compiled, sources), strict=True))

    def _runtime(self, name: str) -> tuple[str, ...]:
        return (f"-L{self._out}", f"-l:{name}", "-Wl,-rpath,$ORIGIN")

    def _link(
        self,
        name: str,
        symbols: set[tuple[str, str]],
        result: int,
        real: Sequence[Path],
        runtime: str,
    ) -> None:
        base = self._out / name
        own: set[str] = set()
        for path in real:
            lines = _output("nm", "--defined-only", "-g", str(path)).splitlines()
            own |= {line.split()[-1] for line in lines if " " in line}
        stubs = sorted({symbol for symbol, _ in symbols} - own)
        code = base.with_suffix(".c")
        text = _STUB_CALLED.replace("LIBRARY", name).replace("RESULT", str(result))
        text += "".join(f'long {stub}(void) {{ return called("{stub}"); }}\n' for stub in stubs)
        code.write_text(text)
        script = base.with_suffix(".map")
        script.write_text(_versions(symbols, own))
        command = ["g++", "-shared", "-fPIC", "-O1", "-pthread", f"-Wl,-soname,{name}"]
        command += ["-o", str(base), f"-Wl,--version-script={script}", "-Wl,-z,now"]
        command += ["-fno-builtin", "-x", "c", str(code), "-x", "none"]
        if real:
            command += map(str, real)
            command += self._runtime(runtime) if name != runtime else ()
        _output(*command)
        code.unlink()
        script.unlink()


def _versions(symbols: set[tuple[str, str]], own: set[str]) -> str:
    """A linker script: symbols get the versions that torch needs, and all others are hidden."""
    by_version: dict[str, set[str]] = defaultdict(set)
    for symbol, version in symbols:
        by_version[version].add(symbol)
    known = {symbol for symbol, _ in symbols}
    main = min((version for version in by_version if version), default="")
    by_version[main] |= own - known
    unversioned = by_version.pop("", set()) if main else set()
    text = ""
    for version, names in sorted(by_version.items()):
        extra = "; ".join(sorted(names))
        hidden = " local: *;" if version == main and not unversioned else ""
        text += f"{version} {{ global: {extra or 'standin_none'};{hidden} }};\n"
    return text
