"""Many jobs on unequal machines: the policies of Gavel on the plans of Penstock, and what a run costs.

A policy divides the time of all devices among jobs, by how fast each job runs on each kind of device. Source:
[Narayanan 2021, chapters 5 and 6]. scipy solves the linear programs: `pip install 'penstock[fleet]'`.

May import the planner and what it plans with; only ``commands`` imports this room. Start reading in ``problems.py``.
"""

from penstock.fleet.allocations import Allocation
from penstock.fleet.cluster_jobs import ClusterJob
from penstock.fleet.executor import FleetExecutor
from penstock.fleet.fleet_files import FleetFile, TrainingCommand
from penstock.fleet.histories import CompletedJob, FleetRun, Held
from penstock.fleet.jobs import Entity, Job, Kind
from penstock.fleet.policies import (
    POLICIES,
    Policy,
    allox,
    blind,
    fifo,
    finish_time_fairness,
    gandiva,
    hierarchical,
    isolated_shares,
    max_min_fairness,
    max_throughput,
    min_cost,
    min_cost_near_deadlines,
    min_cost_with_deadlines,
    min_makespan,
    min_makespan_within_budget,
    shortest_job_first,
    strict_fifo,
    water_filling,
)
from penstock.fleet.problems import Pair, Problem
from penstock.fleet.ray_nodes import RayNodes
from penstock.fleet.round_scheduler import Lease, RoundScheduler
from penstock.fleet.run_pictures import completion_svg, devices_svg, run_page
from penstock.fleet.simulations import PriceHistory, simulate_fleet
from penstock.fleet.throughputs import Machines, ModelJob, PlannedSpeed, ThroughputTable, throughput_table
from penstock.fleet.workloads import (
    THESIS_KINDS,
    Arrival,
    JobType,
    poisson_workload,
    static_workload,
    thesis_types,
)

__all__ = [
    "POLICIES",
    "THESIS_KINDS",
    "Allocation",
    "Arrival",
    "ClusterJob",
    "CompletedJob",
    "Entity",
    "FleetExecutor",
    "FleetFile",
    "FleetRun",
    "Held",
    "Job",
    "JobType",
    "Kind",
    "Lease",
    "Machines",
    "ModelJob",
    "Pair",
    "PlannedSpeed",
    "Policy",
    "PriceHistory",
    "Problem",
    "RayNodes",
    "RoundScheduler",
    "ThroughputTable",
    "TrainingCommand",
    "allox",
    "blind",
    "completion_svg",
    "devices_svg",
    "fifo",
    "finish_time_fairness",
    "gandiva",
    "hierarchical",
    "isolated_shares",
    "max_min_fairness",
    "max_throughput",
    "min_cost",
    "min_cost_near_deadlines",
    "min_cost_with_deadlines",
    "min_makespan",
    "min_makespan_within_budget",
    "poisson_workload",
    "run_page",
    "shortest_job_first",
    "simulate_fleet",
    "static_workload",
    "strict_fifo",
    "thesis_types",
    "throughput_table",
    "water_filling",
]
