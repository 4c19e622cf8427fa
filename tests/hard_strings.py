"""Three hundred short texts on which the rules of pre-tokenizers differ, none of more than 16 bytes in UTF-8."""

from __future__ import annotations

import itertools

_HAND_MADE = [
    "it's", "IT'S", "we'Re", "I'LL go", "'sun'", "don't'", "'ve'VE", "o'clock", "d'été", "'ſ",
    "1", "12", "123", "1234", "12345", "1234567", "123456789012", "1,234.5", "12٣4567", "١٢٣٤٥", "½¾²", "x1y22z333",
    "a1 b12 c123", "$1234", "-1234 5", "1e10", "0x1F", "3.14", "1\n22\n333", "v2.0.1", "1st 2nd", "1_000", "12ab",
    "1234é", "1234_", "1234ab", "1234½", "½1234", "12345\u0301",
    " a", "  a", "   a", "a ", "a  ", "a   ", " ", "  ", "    ", "\n", "\n\n", " \n", "\n ", "\r\n", "\r\n\r\n",
    "\t", "\t\ta", "a\tb", " \ta", "a \n b", "a\n\n\nb", "a  \n  b", "\x0b", "a\u00a0b", "\u00a0 a", "a\u2003b",
    "\u3000a", "a\u2028b", "a\x85b", "a\u200bb", "a\u200db", "\ufeffa", "     a", "        a", "a       b",
    "camelCase", "CamelCase", "HTTPServer", "XMLHttp", "éÉé", "ÉCOLE", "éCole", "ÀÉa", "ǅab", "aʰb", "ßS", "İi", "ñÑ",
    "привет", "ПриВет", "При мир", "γειά", "ΓΕΙΆ", "Ընթ", "ընթ", "Ⴀა", "ა ბ", "Ꭰꭰ",
    "中文", "中 文", "中a文", "中1文2", "中文。", "日本語", "ひらカタ", "ｶﾀ", "カー", "한국어", "한 국", "ㄱㄴ", "ㄅㄆ",
    "㐀㐁", "豈", "𠀀𠀁", "。。", "，a", "！", "（a）", "‘a’", "“a”", "…", "a…b", "—a", "、", "\u3000、",
    "ไทย", "ลาว", "ລາວ", "ភាសា", "မြန်", "हिन्", "क्षि", "বাংলা", "தமிழ்", "عربى", "עברית", "۔a", "।a", "،a",
    "e\u0301a", "\u0301a", "a\u0301\u0301", "1\u0301", "🎉", "🎉🎉", "a🎉b", "👍🏽", "🇩🇪", "❤️",
    "a❤b", "∑x", "x²", "€5", "£ 5",
    "!", "!!", "!a", " !a", "!!a", "a!", "a!!", "?!a", "()", "(a)", "[a]", "{a}", "a_b", "__a", "_a", "a-b", "--a",
    "a/b", "//a", "a//\n", "/\n/", "!\n", "!\r\n\n", "a.\n\nb", "a+b", "a<b>c", "<=>", "^~|`", "`a`",
    "$a", "#a", "@a b",
    "%5", "&amp;", "a=b;", "\\n", "\"a\"", "~a", "a|b", "\x00a", "\x01", "a\x7fb", "\ue000a", "\u0378",
    "IMGIMGABZ", "<sentinel:12>", "a b c", " a b", "ab  cd", "the theater", "in in", "hello world", "L'été", "naïve",
]  # fmt: skip

_PARTS = ["a", "B", "É", "1", "23", "456", "'s", " ", "  ", "\n", "!", "/", "中", "ß", "\u0301", "🎉"]

HARD_STRINGS: list[str] = list(
    dict.fromkeys([*_HAND_MADE, *("".join(each) for each in list(itertools.permutations(_PARTS, 3))[7::29])])
)
