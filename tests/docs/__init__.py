"""`make docs-check`: every command of README.md and docs/*.md is run, in order, in a copy of the checkout.

A ```bash block is a shell script (`bash -euo pipefail`) that must succeed. A comment directly before it says
otherwise; several parts are separated by ";":

    <!-- docs-check: shows -->                       it prints the ```text block after it; … is anything
    <!-- docs-check: background until http://… -->   it goes on to the end of the page; the next block waits
    <!-- docs-check: slow -->                        not in the quick run that is part of the tests
    <!-- docs-check: not run, it needs a GPU -->     listed with this reason
"""
