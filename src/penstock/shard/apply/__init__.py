"""Write decisions out: partition specs with their order of axes, and sharding constraints inside of the step."""
