#!/bin/sh
# The tests of launching on Slurm bring up a private one. Install what it needs when we may; otherwise those tests say what is missing.
# Nothing is started: the tests run the daemons themselves, and a Slurm, munge or MariaDB that was already here stays as it is.
PATH="$PATH:/usr/sbin:/sbin"
missing=
need() { # need PACKAGE FILE-OR-COMMAND
    command -v "$2" >/dev/null 2>&1 || [ -e "$2" ] || missing="$missing $1"
}
need slurm-wlm slurmctld
need slurm-wlm slurmd
need slurm-wlm sbatch
need munge munged
need libslurm-dev /usr/include/slurm/spank.h
need gcc gcc
need libc6-dev /usr/include/stdio.h
need slurmdbd slurmdbd
need mariadb-server mariadbd
need iproute2 ip
[ -z "$missing" ] && exit 0

command="apt-get install --no-install-recommends$missing"
if command -v sbatch >/dev/null 2>&1 && ! dpkg -s slurm-client >/dev/null 2>&1; then
    echo "this machine's Slurm is not Debian's and is left alone: tests that need$missing will be skipped"
    exit 0
fi
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null 2>&1; then
    echo "Slurm for tests is not complete and cannot be installed here: those tests will be skipped ($command)"
    exit 0
fi

echo "installing$missing for the tests on a private Slurm"
units="slurmctld slurmd slurmdbd munge mariadb"
new=
for unit in $units; do
    [ -e "/lib/systemd/system/$unit.service" ] || new="$new $unit"
done
policy=/usr/sbin/policy-rc.d # Debian asks this file before it starts a daemon of a fresh package; 101 is "no"
if [ ! -e "$policy" ]; then
    trap 'rm -f "$policy"' EXIT
    trap 'exit 130' INT TERM HUP
    printf '#!/bin/sh\nexit 101\n' >"$policy" && chmod 755 "$policy"
fi
(apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -yq --no-install-recommends $missing) >/dev/null 2>&1 ||
    echo "that failed: tests on a private Slurm will be skipped ($command)"
if command -v systemctl >/dev/null 2>&1; then
    for unit in $new; do # nor at the next boot
        systemctl disable "$unit" >/dev/null 2>&1
    done
fi
exit 0
