#!/bin/sh
# A one-node SLURM in a separate network and process namespace: nothing of it is reachable from
# outside, and all of it dies with this script. Usage: slurm_cluster.sh DIRECTORY SCRIPT
set -e
cd "$1"
ip link set lo up
# SLURM looks up its addresses with AI_ADDRCONFIG, which fails where only loopback has one.
ip link add br0 type bridge
ip link set br0 up
ip address add 10.9.0.1/24 dev br0
mkdir -p run spool state
cat > slurm.conf <<CONF
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
AuthType=auth/munge
AuthInfo=socket=$1/run/munge.socket
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation=$1/state
SlurmdSpoolDir=$1/spool
SlurmctldPidFile=$1/run/slurmctld.pid
SlurmdPidFile=$1/run/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
SwitchType=switch/none
SlurmdParameters=config_overrides
NodeName=localhost NodeHostname=$(hostname) NodeAddr=127.0.0.1 CPUs=8 State=UNKNOWN
PartitionName=main Nodes=localhost Default=YES MaxTime=INFINITE State=UP
CONF
export SLURM_CONF="$1/slurm.conf"
head -c 1024 /dev/urandom > munge.key
chmod 600 munge.key
chmod 755 .
munged --force --key-file="$1/munge.key" --socket="$1/run/munge.socket" \
    --pid-file="$1/run/munged.pid" --log-file="$1/munged.log" --seed-file="$1/munge.seed"
slurmctld -D > slurmctld.out 2>&1 &
slurmd -D -N localhost > slurmd.out 2>&1 &
# SLURM has no call that waits for a node; the test bounds this loop.
until sinfo -h -o %T 2> sinfo.err | grep -q idle; do sleep 0.1; done
exec sh -c "$2"
