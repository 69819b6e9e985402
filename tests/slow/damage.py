"""Every bit of a container is watched: flip bits and cut files, and see that no damage goes unnoticed.

python tests/slow/damage.py [flips] [truncations]      (default 5000 and 500)
"""

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import faults

if __name__ == "__main__":
    numbers = [int(text) for text in sys.argv[1:]] + [5000, 500][len(sys.argv) - 1 :]
    for name, run, count in (("flips", faults.flips, numbers[0]), ("truncations", faults.truncations, numbers[1])):
        with tempfile.TemporaryDirectory() as folder:
            found = run(Path(folder), count, seed=1)
        print(f"{name}: {count}; " + ", ".join(f"{code} {n}" for code, n in found.most_common()))
