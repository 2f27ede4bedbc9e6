"""The status of a run, and reports from event logs.

status     coverage, agreement, late replicas: from signed records
logs       event logs, read within limits
hosts      participation of each host, and notable events
figures    GB per nat, CE over cost, agreement
html       the report as an HTML page
svg        the plots of that page
"""
