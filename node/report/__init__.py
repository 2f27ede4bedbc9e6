"""How a run stands, and how it went.

status     coverage, agreement, who is behind: from signed records
logs       event logs, read within limits
hosts      who took part, and how
figures    GB per nat, CE, participation
html       the same as a page
svg        its plots
"""
