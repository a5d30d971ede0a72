#!/bin/sh
# Code rewards run untrusted programs in bubblewrap. Install it when we may; otherwise the tests that need it say so and are skipped.
command -v bwrap >/dev/null 2>&1 && exit 0

command="apt-get install --no-install-recommends bubblewrap"
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null 2>&1; then
    echo "bubblewrap is missing and cannot be installed here: tests of the sandbox will be skipped ($command)"
    exit 0
fi

echo "installing bubblewrap for the sandbox"
(apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -yq --no-install-recommends bubblewrap) >/dev/null 2>&1 ||
    echo "that failed: tests of the sandbox will be skipped ($command)"
exit 0
