"""A stand-in for verl: it imports what VERL_USE_EXTERNAL_MODULES names, as verl does."""

import importlib
import os

for name in filter(None, os.environ.get("VERL_USE_EXTERNAL_MODULES", "").split(",")):
    importlib.import_module(name)
