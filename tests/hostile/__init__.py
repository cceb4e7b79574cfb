"""Files that lie: the doors by which one could have code run, traps behind them, and mutations of files."""
