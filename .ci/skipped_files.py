"""Print the files of the tests that a run skipped, from its JUnit XML report (`junit_family=xunit1`)."""

import sys
import xml.etree.ElementTree as ET

cases = ET.parse(sys.argv[1]).iter("testcase")
skips = ((case.get("file"), skip.get("type")) for case in cases for skip in case.iter("skipped"))
print(*sorted({file for file, kind in skips if kind != "pytest.xfail"}))
