"""The texts that quality and speed are measured on: English prose, documentation, code and Chinese, 512 tokens of each.

The English and Chinese passages are from books in the public domain (Carroll 1865; Lu Xun 1918); the documentation is this project's
own; the code is Python's standard library as installed.
"""

from __future__ import annotations

import argparse
import inspect
from pathlib import Path

TOKENS = 512

ENGLISH = """Alice was beginning to get very tired of sitting by her sister on the bank, and of having nothing to do: once or twice she had
peeped into the book her sister was reading, but it had no pictures or conversations in it, "and what is the use of a book," thought
Alice "without pictures or conversations?" So she was considering in her own mind (as well as she could, for the hot day made her feel
very sleepy and stupid), whether the pleasure of making a daisy-chain would be worth the trouble of getting up and picking the daisies,
when suddenly a White Rabbit with pink eyes ran close by her. There was nothing so very remarkable in that; nor did Alice think it so
very much out of the way to hear the Rabbit say to itself, "Oh dear! Oh dear! I shall be late!" (when she thought it over afterwards, it
occurred to her that she ought to have wondered at this, but at the time it all seemed quite natural); but when the Rabbit actually took
a watch out of its waistcoat-pocket, and looked at it, and then hurried on, Alice started to her feet, for it flashed across her mind
that she had never before seen a rabbit with either a waistcoat-pocket, or a watch to take out of it, and burning with curiosity, she ran
across the field after it, and fortunately was just in time to see it pop down a large rabbit-hole under the hedge. In another moment
down went Alice after it, never once considering how in the world she was to get out again. The rabbit-hole went straight on like a
tunnel for some way, and then dipped suddenly down, so suddenly that Alice had not a moment to think about stopping herself before she
found herself falling down a very deep well. Either the well was very deep, or she fell very slowly, for she had plenty of time as she
went down to look about her and to wonder what was going to happen next. First, she tried to look down and make out what she was coming
to, but it was too dark to see anything; then she looked at the sides of the well, and noticed that they were filled with cupboards and
book-shelves; here and there she saw maps and pictures hung upon pegs. She took down a jar from one of the shelves as she passed; it was
labelled "ORANGE MARMALADE", but to her great disappointment it was empty: she did not like to drop the jar for fear of killing somebody
underneath, so managed to put it into one of the cupboards as she fell past it."""

CHINESE = """今天晚上，很好的月光。我不见他，已是三十多年；今天见了，精神分外爽快。才知道以前的三十多年，全是发昏；然而须十分小心。不然，那赵家的狗，
何以看我两眼呢？我怕得有理。今天全没月光，我知道不妙。早上小心出门，赵贵翁的眼色便怪：似乎怕我，似乎想害我。还有七八个人，交头接耳的议论我，
又怕我看见。一路上的人，都是如此。其中最凶的一个人，张着嘴，对我笑了一笑；我便从头直冷到脚跟，晓得他们布置，都已妥当了。我可不怕，仍旧走我的路。
前面一伙小孩子，也在那里议论我；眼色也同赵贵翁一样，脸色也都铁青。我想我同小孩子有什么仇，他也这样。忍不住大声说，“你告诉我！”他们可就跑了。
我想：我同赵贵翁有什么仇，同路上的人又有什么仇；只有廿年以前，把古久先生的陈年流水簿子，踹了一脚，古久先生很不高兴。赵贵翁虽然不认识他，一定也听到风声，
代抱不平；约定路上的人，同我作冤对。但是小孩子呢？那时候，他们还没有出世，何以今天也睁着怪眼睛，似乎怕我，似乎想害我。这真教我怕，教我纳罕而且伤心。
我明白了。这是他们娘老子教的！晚上总是睡不着。凡事须得研究，才会明白。他们——也有给知县打枷过的，也有给绅士掌过嘴的，也有衙役占了他妻子的，
也有老子娘被债主逼死的；他们那时候的脸色，全没有昨天这么怕，也没有这么凶。最奇怪的是昨天街上的那个女人，打他儿子，嘴里说道，“老子呀！我要咬你几口才出气！”
他眼睛却看着我。我出了一惊，遮掩不住；那青面獠牙的一伙人，便都哄笑起来。陈老五赶上前，硬把我拖回家中了。拖我回家，家里的人都装作不认识我；
他们的脸色，也全同别人一样。进了书房，便反扣上门，宛然是关了一只鸡鸭。这一件事，越教我猜不出底细。"""


def passages() -> dict[str, str]:
    """The four texts by name, each longer than `TOKENS` tokens of any of the supported tokenizers."""
    docs = (Path(__file__).parent.parent / "docs" / "bundle.md").read_text(encoding="utf-8")
    return {"english": ENGLISH, "docs": docs, "code": inspect.getsource(argparse), "chinese": CHINESE}
