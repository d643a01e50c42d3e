"""Names that a careless page would run, fetch or be rearranged by."""

HOSTILE = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(2)>',
    "' onmouseover='alert(3)",
    "</style><script>alert(4)</script>",
    "--><svg/onload=alert(5)>",
    "</title></svg><iframe src=//example.org>",
    "javascript:alert(6)",
    "&lt;b&gt;&#x3C;script&#x3E;",
    "long " + "W" * 9_995,
    "\u202egnp.exe\u202c",
    "\u0627\u0633\u0645 \u05e9\u05dd",
    "👩‍👩‍👧 naïve",
    "nul\x00bell\x07escape\x1b[31m",
    "two\nlines\tand a tab",
    "`${alert(7)}` {{7*7}}",
)
