"""Every call that a command makes on its files fails once, in every way; nothing partial may ever be seen.

python tests/slow/machine_faults.py [SCENARIO ...]      (default all of tests/machine_faults.py)
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from machine_faults import OF_OUTPUTS, SCENARIOS, WAYS, Machine, faults_of


def main(names: list[str]) -> int:
    wrong = cases = 0
    with tempfile.TemporaryDirectory() as folder:
        machine = Machine(Path(folder))
        for name in names:
            begun, statuses = time.perf_counter(), Counter[int]()
            machine.truth(name)
            for way in WAYS if SCENARIOS[name].outputs else WAYS[:1]:
                counts = machine.run(SCENARIOS[name], way=way).counts
                if way != WAYS[0]:  # what is read is read alike
                    counts = {kind: counts[kind] for kind in OF_OUTPUTS}
                for fault in faults_of(counts):
                    answer = machine.run(SCENARIOS[name], fault, way)
                    found = machine.judge(name, fault, answer)
                    statuses[answer.status] += 1
                    if found:
                        wrong += 1
                        print(
                            f"WRONG {name} [{way}] {fault}: {found}\n  at {answer.hit}\n  {answer.err[-500:]!r}",
                            flush=True,
                        )
            cases += statuses.total()
            told = ", ".join(f"exit {status}: {count}" for status, count in sorted(statuses.items()))
            print(f"{name}: {statuses.total()} cases in {time.perf_counter() - begun:.0f} s; {told}", flush=True)
        machine.close()
    print(f"{cases} cases, {wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:] or list(SCENARIOS)))
