"""titan-tree xray: what rollouts and sessions of coding agents repeat, without a GPU and without a model.

sources.py    files, folders and sessions -> groups of records
rendering.py  a group -> paths, and the kind of message that each token belongs to
secrets.py    hides what looks like keys and passwords
segments.py   a token tree -> segments, the columns of the page
pictures.py   the distinct images of all trees -> small pictures
credit.py     the advantages of a tree's answers under every estimator
payload.py    all trees -> the payload, a JSON object
runs.py       the folder of a run -> its curves and its configuration
sentences.py  totals -> sentences
page/         the payload -> one HTML file
"""
