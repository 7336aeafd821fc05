"""The passes read graphs, prove facts about them and rewrite them with the functions of this folder. No pass is here.
"""
