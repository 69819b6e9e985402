"""Hostile files of every format: each is read or refused, in bounded time and memory, never with a traceback.

python tests/slow/fuzz.py [seconds]      (default 600); a failing input is kept under tests/data/hostile/
"""

import resource
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path
from random import Random

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[1]))

import faults

ADDRESS_SPACE = 3 << 30  # of the whole process; the interpreter and its libraries take a third of it
HANG = 10  # seconds for one input of a few kilobytes
KEPT = Path(__file__).parents[1] / "data" / "hostile"


def hung(*_: object) -> None:
    raise AssertionError(f"no answer in {HANG} seconds")


def main(seconds: float) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
    signal.signal(signal.SIGALRM, hung)
    warnings.simplefilter("error")  # a user would see them on stderr
    found: Counter[str] = Counter()
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        contents = [(path.name, path.read_bytes()) for path in faults.seeds(folder)]

        def one(which: tuple[str, bytes], random: Random, twice: bool) -> None:
            label, content = which
            if twice and label.endswith(".tq.safetensors"):
                content = faults.signed_again(content, random)
            else:
                content = faults.mutated(content, random)
            target = folder / f"fuzzed-{label}"
            target.write_bytes(content)
            signal.alarm(HANG)
            try:
                found[faults.survives(target)] += 1
            except BaseException:
                KEPT.mkdir(parents=True, exist_ok=True)
                (KEPT / f"found-{label}").write_bytes(content)  # the smallest one that Hypothesis comes to
                raise
            finally:
                signal.alarm(0)

        round_number = 0
        while time.monotonic() - begun < seconds:
            drawn = given(st.sampled_from(contents), st.randoms(use_true_random=False), st.booleans())
            chosen = settings(
                max_examples=2000,
                database=None,
                deadline=None,
                phases=(Phase.generate, Phase.shrink),
                suppress_health_check=list(HealthCheck),
            )
            seed(round_number)(chosen(drawn(lambda which, random, twice: one(which, random, twice))))()
            round_number += 1
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    total = sum(found.values())
    print(f"{total} inputs in {time.monotonic() - begun:.0f} s, peak {peak // 1024} MiB")
    print(", ".join(f"{code} {n}" for code, n in found.most_common()))


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 600)
