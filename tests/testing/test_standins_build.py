"""Building the stand-ins for CUDA and NCCL: refusals, the cache, and the layouts of structures."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from reloadpg.testing import standins
from reloadpg.testing.standins import _build

SOURCES = Path(standins.__file__).parent
CUDA_BUILD = torch.version.cuda is not None
needs_cuda_build = pytest.mark.skipif(
    not CUDA_BUILD, reason=f"torch {torch.__version__} is built without CUDA"
)


def command(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *words],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.skipif(CUDA_BUILD, reason="torch is the CUDA build")
def test_a_torch_without_cuda_is_refused_with_the_package_to_install() -> None:
    with pytest.raises(standins.StandinsError, match="is a build without CUDA") as caught:
        standins.build()
    plain = torch.__version__.partition("+")[0]
    assert f"pip install --no-deps torch=={plain}" in str(caught.value)


@pytest.mark.skipif(CUDA_BUILD, reason="torch is the CUDA build")
def test_command_and_plugin_refuse_a_torch_without_cuda(tmp_path: Path) -> None:
    done = command("reloadpg", "standins", "run", "--", "true")
    assert done.returncode != 0
    assert "is a build without CUDA" in done.stderr
    done = command("pytest", "-c", os.devnull, "--reloadpg-standins", str(tmp_path))
    assert done.returncode == 4
    assert "is a build without CUDA" in done.stderr


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if not CUDA_BUILD:
        pytest.skip(f"torch {torch.__version__} is built without CUDA")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(standins.StandinsError, match=r"g\+\+ was not found"):
        standins.build()


@pytest.mark.slow
@needs_cuda_build
def test_two_processes_that_build_at_once_make_one_build(tmp_path: Path) -> None:
    """Also after a build that was killed."""
    library = _build._Torch.installed()
    name = f"torch-{library.version}-{_build._digest(library, _build._compiler())}"
    cache = tmp_path / "reloadpg" / "standins"
    cache.mkdir(mode=0o700, parents=True)
    (cache / f"building-{name}").mkdir()
    (cache / f"building-{name}" / "libraries").write_text("a part")
    words = [sys.executable, "-m", "reloadpg", "standins", "build"]
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    processes = [
        subprocess.Popen(words, env=env, stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    folders = {process.communicate(timeout=500)[0] for process in processes}
    assert [process.returncode for process in processes] == [0, 0]
    assert len(folders) == 1
    assert [path.name for path in cache.iterdir() if path.is_dir()] == [
        Path(folders.pop().strip()).name
    ]
    assert cache.stat().st_mode & 0o777 == 0o700


@pytest.mark.standins
@needs_cuda_build
def test_a_command_runs_in_a_job_that_is_gone_afterwards(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, torch\n"
        "torch.cuda.init()\n"
        "print(os.environ['RELOADPG_STANDIN_JOB'], torch.cuda.device_count())\n"
        "sys.exit(3)\n"
    )
    done = command(
        *("reloadpg", "standins", "run", "--", sys.executable, str(script)),
        RELOADPG_STANDIN_DEVICES="3",
        CUDA_VISIBLE_DEVICES="",
    )
    assert done.returncode == 3, done.stderr
    folder, devices = done.stdout.split()
    assert devices == "3"
    assert not Path(folder).exists()


@pytest.mark.standins
@needs_cuda_build
def test_kernels_are_replaced_where_torch_was_told_to_load_no_backends() -> None:
    """By the environment of the caller: CUDA's own kernels compute nothing here."""
    program = "import torch; print((torch.ones(3, device='cuda') * 2).sum().item())"
    words = ("reloadpg", "standins", "run", "--", sys.executable, "-c", program)
    done = command(*words, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert done.stdout.split() == ["6.0"], done.stderr


FILLED = """
from reloadpg.testing import run_ranks


def filled(rank, size):
    import torch

    return (torch.ones(3, device="cuda") * 2).sum().item()


if __name__ == "__main__":
    print(run_ranks(filled, 2, standins=True))
"""


@pytest.mark.standins
@needs_cuda_build
def test_kernels_are_replaced_in_ranks_of_a_program_without_the_stand_ins(tmp_path: Path) -> None:
    """A new interpreter runs them. It has the path of the program, which lacks our entry point."""
    script = tmp_path / "script.py"
    script.write_text(FILLED)
    own = standins.preloading()
    environment = {name: value for name, value in os.environ.items() if name not in own}
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.stdout.strip() == "[6.0, 6.0]", done.stderr


# ---------------------------------------------------------------------------------------------
# layouts

FIELDS = {
    "cudaDeviceProp": (
        *("name", "uuid", "totalGlobalMem", "sharedMemPerBlock", "regsPerBlock", "warpSize"),
        *("maxThreadsPerBlock", "maxThreadsDim", "maxGridSize", "totalConstMem", "major", "minor"),
        *("multiProcessorCount", "integrated", "surfaceAlignment", "concurrentKernels"),
        *("pciBusID", "asyncEngineCount", "unifiedAddressing", "memoryBusWidth", "l2CacheSize"),
        *("maxThreadsPerMultiProcessor", "streamPrioritiesSupported", "regsPerMultiprocessor"),
        *("sharedMemPerMultiprocessor", "sharedMemPerBlockOptin", "maxBlocksPerMultiProcessor"),
    ),
    "cudaPointerAttributes": ("type", "device", "devicePointer", "hostPointer"),
    "cudaFuncAttributes": ("maxThreadsPerBlock", "numRegs", "ptxVersion", "binaryVersion"),
    "cudaLaunchConfig_t": ("gridDim", "blockDim", "dynamicSmemBytes", "stream", "numAttrs"),
    "ncclConfig_t": ("size", "blocking", "netName", "splitShare", "commName"),
    "CUmemLocation": ("type", "id"),
    "CUmemAllocationProp": (
        *("type", "requestedHandleTypes", "location", "win32HandleMetaData", "allocFlags"),
    ),
    "CUmulticastObjectProp": ("numDevices", "size", "handleTypes", "flags"),
}
WHOLE = (
    *("cudaPointerAttributes", "cudaLaunchConfig_t", "ncclUniqueId", "dim3"),
    *("CUmemLocation", "CUmemAllocationProp", "CUmulticastObjectProp"),
)
"""Structures that the stand-ins write or copy whole."""
SHIMS = {  # what the packages of the runtime and of NCCL lack, and the declarations do not need
    "cuda_runtime.h": "#include <cuda_runtime_api.h>",
    "cuda_fp16.h": "",
    "cuda_bf16.h": "",
    "cuda_fp8.h": "",
    "crt/host_defines.h": "\n".join(
        f"#define {name}"
        for name in (
            *("__host__", "__device__", "__global__", "__cudart_builtin__", "__device_builtin__"),
            *("__device_builtin_surface_type__", "__device_builtin_texture_type__", "CUDARTAPI"),
            *("CUDARTAPI_CDECL", "CUDA_CB", "__inline_hint__", "__specialization_static"),
            *("__nv_pure__", "__forceinline__ inline"),
        )
    )
    + "\n#define __builtin_align__(n) __attribute__((aligned(n)))\n"
    "#define __align__(n) __attribute__((aligned(n)))\n#define __CUDACC_VER_MAJOR__ 13\n",
}


def nvidia_includes() -> list[Path]:
    """Folders of NVIDIA's headers for this torch, if its packages are installed."""
    spec = importlib.util.find_spec("nvidia")
    places = [Path(place) for place in spec.submodule_search_locations or ()] if spec else []
    found = [
        next(place.glob(f"*/include/{name}"), None)
        for place in places
        for name in ("cuda_runtime_api.h", "nccl.h")
    ]
    return [path.parent for path in found if path is not None]


@pytest.mark.standins
@needs_cuda_build
def test_layouts_and_values_are_those_of_nvidias_headers(tmp_path: Path) -> None:
    includes = nvidia_includes()
    if len(includes) < 2:
        pytest.skip("the packages of NVIDIA that torch requires are not installed")
    own = (SOURCES / "abi.h").read_text()
    values = re.findall(r"^  ((?:cuda|nccl|CU_)\w+) = -?\d+,", own, re.M)
    values += re.findall(r"^constexpr \w+ (\w+) =", own, re.M)
    one_line = re.findall(r"enum nccl\w+ : int \{ (.*) \};", own)
    values += re.findall(r"(nccl\w+) =", " ".join(one_line))
    names = ("cuda.h", "cuda_runtime_api.h", "driver_types.h", "nccl.h")
    paths = [path for folder in includes for name in names if (path := folder / name).is_file()]
    headers = "".join(path.read_text() for path in paths)
    values = [value for value in values if value in headers]  # older ones lack a few
    assert len(values) > 60
    assert sum(value.startswith("CU_") for value in values) == 10
    lines = [f'printf("{value} %ld\\n", (long)({value}));' for value in values]
    for name, fields in FIELDS.items():
        lines += [
            f'printf("{name}.{field} %zu\\n", offsetof({name}, {field}));' for field in fields
        ]
    lines += [f'printf("{name} %zu\\n", sizeof({name}));' for name in WHOLE]
    body = "int main() {\n" + "\n".join(lines) + "\n}\n"
    for name, text in SHIMS.items():
        (tmp_path / "shims" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "shims" / name).write_text(text)
    major = (torch.version.cuda or "").partition(".")[0]
    heads = {
        "ours": f"#define CUDART_MAJOR {major}\n#include <cstdio>\n#include <abi.h>\n",
        "theirs": "#include <cstdio>\n#include <cstddef>\n#include <cuda.h>\n"
        "#include <cuda_runtime_api.h>\n#include <nccl.h>\n",
    }
    folders = {"ours": [SOURCES], "theirs": [tmp_path / "shims", *includes]}
    printed = {}
    for name, head in heads.items():
        source = tmp_path / f"{name}.cpp"
        source.write_text(head + body)
        paths = [f"-I{folder}" for folder in folders[name]]
        program = str(tmp_path / name)
        flags = ["-std=c++17", "-w", "-fpermissive"]
        subprocess.run(["g++", *flags, *paths, str(source), "-o", program], check=True)
        printed[name] = subprocess.run([program], capture_output=True, text=True).stdout
    assert printed["ours"].splitlines() == printed["theirs"].splitlines()


RANKS_AS_THREADS = """
#include <thread>
#include <vector>
#include <abi.h>
EXPORT cudaError_t cudaSetDevice(int);
EXPORT cudaError_t cudaDeviceSynchronize();
EXPORT ncclResult_t ncclCommInitAll(ncclComm_t*, int, const int*);
EXPORT ncclResult_t ncclCommSplit(ncclComm_t, int, int, ncclComm_t*, ncclConfig_t*);
EXPORT ncclResult_t ncclCommDestroy(ncclComm_t);
EXPORT ncclResult_t ncclGroupStart();
EXPORT ncclResult_t ncclGroupEnd();
EXPORT ncclResult_t ncclAllReduce(const void*, void*, size_t, ncclDataType_t, ncclRedOp_t,
                                  ncclComm_t, cudaStream_t);
EXPORT ncclResult_t ncclSend(const void*, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t);
EXPORT ncclResult_t ncclRecv(void*, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t);

constexpr int n = 5;
ncclComm_t worlds[n];
float sums[n], received[n];

void run(int rank) {
  cudaSetDevice(rank);
  float own = rank + 1;
  ncclComm_t part;
  ncclAllReduce(&own, &sums[rank], 1, ncclFloat32, ncclSum, worlds[rank], nullptr);
  ncclGroupStart();
  ncclSend(&own, 1, ncclFloat32, (rank + 1) % n, worlds[rank], nullptr);
  ncclRecv(&received[rank], 1, ncclFloat32, (rank + n - 1) % n, worlds[rank], nullptr);
  ncclGroupEnd();
  ncclCommSplit(worlds[rank], 0, n - rank, &part, nullptr);
  cudaDeviceSynchronize();
  ncclCommDestroy(part);
  ncclCommDestroy(worlds[rank]);
}

int main() {
  ncclCommInitAll(worlds, n, nullptr);
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < n; rank++) ranks.emplace_back(run, rank);
  for (auto& each : ranks) each.join();
  int wrong = 0;
  for (int rank = 0; rank < n; rank++)
    wrong += sums[rank] != 15 || received[rank] != (rank ? rank : n);
  return wrong;
}
"""


@pytest.mark.slow
def test_memory_is_accessed_at_aligned_addresses(tmp_path: Path) -> None:
    """Linux delays an atomic access across cache lines: tens of seconds on a loaded machine."""
    (tmp_path / "ranks.cpp").write_text(RANKS_AS_THREADS)
    names = ("cuda_runtime.cpp", "cuda_nccl.cpp", "nccl.cpp")
    sources = [tmp_path / "ranks.cpp", *(SOURCES / name for name in names)]
    flags = ["-std=c++17", "-pthread", "-DCUDART_MAJOR=13", "-DNCCL_VERSION_CODE=22703"]
    flags += ["-fsanitize=alignment", "-fsanitize-undefined-trap-on-error", f"-I{SOURCES}"]
    program = str(tmp_path / "ranks")
    subprocess.run(["g++", *flags, *sources, "-ldl", "-o", program], check=True, timeout=300)
    job = {**os.environ, standins.JOB: str(tmp_path)}
    assert subprocess.run([program], env=job, timeout=60).returncode == 0
