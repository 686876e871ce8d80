"""Print the files of the tests that a run skipped, from its JUnit XML report (`junit_family=xunit1`)."""

import sys
import xml.etree.ElementTree as ET

cases = ET.parse(sys.argv[1]).iter("testcase")
print(*sorted({case.get("file") for case in cases if case.find("skipped") is not None}))
