#!/bin/sh
# The test of report.html needs a browser. Install Debian's when we may; otherwise that test says what is missing.
command -v chromium >/dev/null 2>&1 && exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    echo "installing chromium for the test of report.html"
    (apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -yq --no-install-recommends chromium) >/dev/null 2>&1 && exit 0
fi
echo "chromium is not installed and cannot be installed here: the test of report.html will be skipped (apt-get install chromium)"
