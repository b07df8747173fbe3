"""What the library costs a program before it is used: its import, and ``install()``.

``import``: ``import reloadpg`` in a fresh interpreter, which must not load torch. ``install``: the
call in a process with torch and 3,000 loaded modules, one of which has an early alias of
``new_group`` under another name that the call must find. Generated modules fill up the number; they
have as many functions and classes as loaded modules have names on average. ``load`` is the time of
the first use of a name of the library before ``install``, with torch loaded; it has no limit.

Each figure is the median of fresh processes. The limits are on CPU time, since nothing here waits:
on an idle machine it equals the wall time.

Usage: python benchmarks/startup.py [--check] [--json PATH] [--processes N] [--quick]
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from _output import command_line, machine, write_json

from reloadpg.texts import table

MODULES = 3000
LIMITS_MS = {"import": 50.0, "install": 20.0}
TIME_LIMIT_S = 120

CLOCK = """
import sys, time
def clock(): return time.perf_counter(), time.process_time()
def since(begun): return [(now - then) * 1e3 for now, then in zip(clock(), begun)]
"""

IMPORT = (
    CLOCK
    + """
import json
begun = clock()
import reloadpg
taken = since(begun)
print(json.dumps({"import": taken, "torch": "torch" in sys.modules}))
"""
)

INSTALL = (
    CLOCK
    + """
import json, types
import torch, torch.distributed as dist

def names_of(module): return len(vars(module)) if isinstance(module, types.ModuleType) else 0
average = sum(map(names_of, sys.modules.values())) // len(sys.modules)
body = "\\n".join(
    f"def function_{i}(): return {i}\\nclass Class_{i}: value_{i} = {i}\\nVALUE_{i} = object()"
    for i in range(max(average - 8, 3) // 3)
)
code = compile("import os, sys, json\\n" + body, "generated", "exec")
wanted = int(sys.argv[1])
def generate(name):
    module = sys.modules[name] = types.ModuleType(name)
    exec(code, vars(module))
    return module
begun = clock()
import reloadpg
reloadpg.install
load = since(begun)
while len(sys.modules) < wanted - 1:
    generate(f"generated_{len(sys.modules)}")
alias = generate("generated_alias")
alias.make_group = dist.new_group
was = [dist.new_group]  # a plain name here would be an early alias too
begun = clock()
reloadpg.install()
taken = since(begun)
print(json.dumps({
    "install": taken,
    "load": load,
    "modules": len(sys.modules),
    "names": sum(map(names_of, sys.modules.values())),
    "alias_found": alias.make_group is not was[0] and alias.make_group is dist.new_group,
}))
"""
)


def measured(code: str, processes: int, *arguments: str) -> list[dict[str, Any]]:
    """The figures of some fresh processes."""
    figures = []
    for _ in range(processes):
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments],
            capture_output=True,
            text=True,
            timeout=TIME_LIMIT_S,
            check=False,
        )
        if done.returncode != 0:
            raise SystemExit(f"a measured process failed:\n{done.stderr}")
        figures.append(json.loads(done.stdout.splitlines()[-1]))
    return figures


def rows_of(figures: Sequence[dict[str, Any]], names: Sequence[str]) -> list[dict[str, Any]]:
    """Medians, and the longest of the processes, by what was measured. Milliseconds."""
    rows = []
    for name in names:
        wall, cpu = zip(*(one[name] for one in figures), strict=True)
        rows.append(
            {
                "what": name,
                "wall_ms": statistics.median(wall),
                "cpu_ms": statistics.median(cpu),
                "longest_cpu_ms": max(cpu),
                "limit_ms": LIMITS_MS.get(name),
            }
        )
    return rows


def check_limits(
    rows: Sequence[dict[str, Any]],
    imports: Sequence[dict[str, Any]],
    installs: Sequence[dict[str, Any]],
) -> dict[str, Any]:
    """Whether everything is within its limit, and the facts that the figures rest on hold."""
    over = [
        row["what"]
        for row in rows
        if row["limit_ms"] is not None and not row["cpu_ms"] < row["limit_ms"]
    ]
    facts = {
        "import_loads_torch": any(one["torch"] for one in imports),
        "alias_found": all(one["alias_found"] for one in installs),
        "modules": min(one["modules"] for one in installs),
        "names": min(one["names"] for one in installs),
    }
    ok = not over and not facts["import_loads_torch"] and facts["alias_found"]
    return {"over": over, "facts": facts, "ok": ok}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it and print the table."""
    parser = command_line(__doc__)
    parser.add_argument("--processes", type=int, default=9, help="fresh processes of each figure")
    options = parser.parse_args(arguments)
    processes = 1 if options.quick else options.processes
    imports = measured(IMPORT, processes)
    installs = measured(INSTALL, processes, str(MODULES))
    rows = rows_of(imports, ["import"]) + rows_of(installs, ["install", "load"])
    result = {
        "benchmark": "startup",
        "machine": machine(),
        "settings": {"processes": processes, "modules": MODULES},
        "rows": rows,
        **check_limits(rows, imports, installs),
    }
    columns = ("what", "cpu_ms", "limit_ms", "longest_cpu_ms", "wall_ms")
    header = [name.replace("_", " ") for name in columns]
    print(table(header, [[row[name] for name in columns] for row in rows]), end="\n\n")
    for name, fact in result["facts"].items():
        print(f"{name.replace('_', ' ')}: {fact}")
    print("ok" if result["ok"] else "OVER A LIMIT")
    write_json(options.json, result)
    return 1 if options.check and not result["ok"] else 0


if __name__ == "__main__":
    sys.exit(main())
