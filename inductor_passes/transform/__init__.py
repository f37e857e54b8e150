"""What a plan does to a program: ``merge`` its buckets, then ``order`` their starts and waits.

``needs`` is what all orders must respect. ``windows`` says which reduces are waited for early where
nothing is planned. ``portable`` names the members of buckets by parameters, so that a plan of one
graph can be written into another.
Nothing here knows why a plan is as it is, or what anything costs.
"""
