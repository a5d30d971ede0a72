"""A stand-in for a Ray worker: it imports what a policy worker imports, and does nothing."""

import sys

import megatron.bridge
import megatron.core

sys.stdout.write(f"(MegatronPolicyWorker pid=1) imported {megatron.bridge.__name__} and {megatron.core.__name__}\n")
