"""Pairs of SVG code and its rendering, made from nothing: drawings whose captions carry exact coordinates.

python -m k3_plugins.data.render --output DIR --count 1000

drawing.py    what a drawing is: SVG, objects with boxes, and the caption made of them
kinds.py      the kinds of drawings
renderer.py   SVG to PNG
shards.py     webdataset tar shards
"""
