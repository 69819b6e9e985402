"""Speed as ratios within one run: what `tqtool bench` measures."""
