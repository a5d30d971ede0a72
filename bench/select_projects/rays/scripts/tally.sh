#!/bin/sh
# Counts the words that a file has.
set -e
here=$(dirname "$0")
count=$(grep -c . "$here/../config/words.txt")
echo "words $count"
