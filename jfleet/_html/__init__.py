"""A page of pictures and tables: one file that needs no network.

It draws what it is given; what a plan is, others know.
"""

from jfleet._html.arrays import Array as Array
from jfleet._html.bars import Bars as Bars
from jfleet._html.page import Layout as Layout
from jfleet._html.page import Page as Page
from jfleet._html.page import page_html as page_html
from jfleet._html.sheet import Sheet as Sheet
