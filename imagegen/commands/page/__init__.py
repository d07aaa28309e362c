"""The page of `imagegen page`: what a model draws, shown while it is drawn.

`studio`, `pictures` and `walk` know nothing of Gradio; `app` puts the tabs together, and each file
`*_tab.py` holds one.
"""
