"""Which strategy is fastest and fits: candidates, their plans, and the choice.

strategy, devices --candidates--> plans --choose--> the fastest that fits
"""
