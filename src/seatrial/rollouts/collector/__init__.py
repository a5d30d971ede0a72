"""The collector: runs the pending units of some shards against one backend and journals each outcome."""
