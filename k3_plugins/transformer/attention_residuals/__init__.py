"""Block Attention Residuals: depth-wise softmax attention in place of the residual sum (feature `attnres`).

See README.md in this folder. Nothing is imported here.
"""
