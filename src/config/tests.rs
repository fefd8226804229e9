use super::*;

fn file(text: &str) -> Result<ServeArgs> {
    parse_file(text, Path::new("test.toml"))
}

fn config(text: &str) -> Result<Config> {
    Config::validate(file(text)?)
}

fn message<T: fmt::Debug>(result: Result<T>) -> String {
    format!("{:#}", result.unwrap_err())
}

#[test]
fn nothing_typed_is_a_whole_config() {
    let config = Config::validate(ServeArgs::default()).unwrap();
    assert_eq!(config.listen.to_string(), "127.0.0.1:8123");
    assert_eq!((config.http.port(), config.master_listen.port(), config.master_http.port()), (8081, 8715, 8080));
    assert_eq!((config.direct_port_base, config.advertise_host.as_str()), (8200, "127.0.0.1"));
    assert_eq!(config.arena, Arena::Shared("/dev/shm".into()));
    assert_eq!((config.shards, config.memory), (None, None));
}

#[test]
fn flags_win_over_the_file_and_the_file_over_defaults() {
    let typed = ServeArgs { listen: Some(parse_address("127.0.0.1:1").unwrap()), ..ServeArgs::default() };
    let file = file("listen = \"127.0.0.1:2\"\nhttp = \"127.0.0.1:3\"\nmemory = \"1GiB\"").unwrap();
    let config = Config::validate(overlay(typed, file)).unwrap();
    assert_eq!((config.listen.port(), config.http.port(), config.memory), (1, 3, Some(1 << 30)));
    assert_eq!(config.master_http.port(), 8080);
}

#[test]
fn an_arena_that_was_typed_takes_both_settings_out_of_the_file() {
    let typed = ServeArgs { arena_dir: Some("/mnt/shm".into()), ..ServeArgs::default() };
    let merged = overlay(typed, file("arena = \"anonymous\"").unwrap());
    assert_eq!(Config::validate(merged).unwrap().arena, Arena::Shared("/mnt/shm".into()));
}

#[test]
fn an_unknown_key_is_named() {
    let error = message(file("listen = \"a:1\"\nmemroy = 1"));
    assert!(error.contains("test.toml") && error.contains("unknown key `memroy`"), "{error}");
    assert!(message(file("[broker]\nlisten = \"a:1\"")).contains("unknown key `broker`"));
}

#[test]
fn values_of_the_wrong_kind_are_named_with_what_they_must_be() {
    for (text, expected) in [
        ("listen = 8123", "`listen` must be HOST:PORT"),
        ("listen = \"8123\"", "not HOST:PORT"),
        ("shards = \"two\"", "`shards` must be a number"),
        ("shards = 70000", "`shards` must be a number"),
        ("memory = \"1GB\"", "not a size"),
        ("memory = -1", "`memory` must be a size"),
        ("arena = \"swap\"", "`arena` must be \"shared\" or \"anonymous\""),
        ("data = 1", "text in quotes"),
        ("listen = \"a:1\"\n\nlisten = ", "line 3"),
    ] {
        let error = message(file(text));
        assert!(error.contains(expected), "{text}: {error}");
        assert!(!error.contains('\n'), "{error}");
    }
}

#[test]
fn settings_that_do_not_fit_each_other_are_refused() {
    for (text, expected) in [
        ("http = \"127.0.0.1:8123\"", "`listen` and `http` are the same port 8123"),
        ("master_http = \"0.0.0.0:8715\"", "same port"),
        ("listen = \"127.0.0.1:8200\"", "direct ports"),
        ("direct_port_base = 65535\nshards = 2", "past 65535"),
        ("shards = 0", "use 1 to 256"),
        ("shards = 4\nmemory = \"64MiB\"", "need 128MiB at least"),
        ("segment_bytes = \"16MiB\"", "use 32MiB to 2GiB"),
        ("segment_bytes = 33554433", "whole blocks"),
        ("arena = \"anonymous\"\narena_dir = \"/dev/shm\"", "leave one of them out"),
        ("advertise = \"host:0\"", "port 0"),
        ("advertise = \"host:x\"", "not HOST:PORT"),
        ("advertise_direct_base = 0", "advertise_direct_base"),
        ("listen = \"no.such.host.invalid:1\"", "no such host"),
    ] {
        let error = message(config(text));
        assert!(error.contains(expected), "{text}: {error}");
    }
}

#[test]
fn port_0_is_accepted_everywhere() {
    let text = "listen = \":0\"\nhttp = \":0\"\nmaster_listen = \":0\"\nmaster_http = \":0\"\ndirect_port_base = 0";
    assert_eq!(config(text).unwrap().listen.to_string(), "0.0.0.0:0");
}

#[test]
fn clients_are_told_what_was_advertised_or_where_the_broker_listens() {
    let told = |text: &str| {
        let config = config(text).unwrap();
        (config.advertise_host, config.advertise_port)
    };
    assert_eq!(told("advertise = \"broker.example\""), ("broker.example".to_owned(), None));
    assert_eq!(told("advertise = \"broker.example:9\""), ("broker.example".to_owned(), Some(9)));
    assert_eq!(told("advertise = \"fe80::1\""), ("fe80::1".to_owned(), None));
    assert_eq!(told("advertise = \"[fe80::1]:9\""), ("fe80::1".to_owned(), Some(9)));
    assert_eq!(told("listen = \"[::1]:5\""), ("::1".to_owned(), None));
    assert!(!told("listen = \"0.0.0.0:5\"").0.starts_with("0."));
}

#[test]
fn sizes_are_bytes_or_binary_units() {
    assert_eq!(parse_size("4096").unwrap(), 4096);
    assert_eq!(parse_size("64MiB").unwrap(), 64 << 20);
    assert_eq!(parse_size("1 GiB").unwrap(), 1 << 30);
    assert_eq!(parse_size("2TiB").unwrap(), 2 << 40);
    for bad in ["", "MiB", "1.5GiB", "-1", "64MB", "64mib", "99999999TiB", "1é", "18446744073709551616"] {
        assert!(parse_size(bad).is_err(), "{bad}");
    }
    for bytes in [0, 1, 4096, 3 << 20, 1 << 30, 5 << 40] {
        assert_eq!(parse_size(&show_size(bytes)).unwrap(), bytes);
    }
}

#[test]
fn sizes_for_people_are_short() {
    assert_eq!((show_about(224), show_about(1536)), ("224 bytes".to_owned(), "1.5 KiB".to_owned()));
    assert_eq!(show_about(5 << 30), "5.0 GiB");
}

#[test]
fn addresses_keep_names_and_ipv6() {
    for (text, host, port) in [("a:1", "a", 1), ("[::1]:0", "::1", 0), (":80", "0.0.0.0", 80)] {
        assert_eq!(parse_address(text).unwrap(), Address { host: host.to_owned(), port });
    }
    for bad in ["a", "a:", "a:70000", "::1:8123", "[::1:8123", ""] {
        assert!(parse_address(bad).is_err(), "{bad}");
    }
    assert_eq!(parse_address("[::1]:7").unwrap().to_string(), "[::1]:7");
}

const DEPLOYED: &str = include_str!("../../deploy/ringmain.toml");

#[test]
fn the_deployed_file_parses_as_it_is_and_changes_nothing() {
    assert_eq!(config(DEPLOYED).unwrap(), Config::validate(ServeArgs::default()).unwrap());
}

#[test]
fn the_deployed_file_lists_every_setting_with_a_value_that_parses() {
    // A setting stands as `#key = value`, without a space, unlike prose.
    let uncommented: Vec<_> = DEPLOYED
        .lines()
        .filter_map(|line| line.strip_prefix('#'))
        .filter(|line| line.starts_with(|c: char| c.is_ascii_lowercase()))
        .collect();
    let keys: Vec<_> = uncommented.iter().map(|line| line.split(" = ").next().unwrap()).collect();
    let settings: Vec<_> = SETTINGS.iter().map(|setting| setting.key).collect();
    assert_eq!(keys, settings);
    for line in uncommented {
        config(line).unwrap_or_else(|error| panic!("{line}: {error:#}"));
    }
}

#[test]
fn every_setting_of_the_file_is_a_flag_and_an_environment_variable() {
    use clap::CommandFactory;
    let command = crate::cli::Cli::command();
    let serve = command.find_subcommand("serve").unwrap();
    for setting in SETTINGS {
        let flag = serve.get_arguments().find(|argument| argument.get_id() == setting.key);
        let variable = flag.and_then(clap::Arg::get_env).unwrap_or_else(|| panic!("{}", setting.key));
        assert_eq!(variable.to_str().unwrap(), format!("RINGMAIN_{}", setting.key.to_uppercase()));
    }
}

#[test]
fn a_mistyped_log_level_is_refused_and_filters_are_not() {
    for text in ["info", "WARN", "info,ringmain_shard=debug", "ringmain_wire", "off"] {
        assert_eq!(parse_log(text), Ok(text.to_owned()));
    }
    for text in ["inof", "info,debgu", "", "ringmain=nonsense"] {
        assert!(parse_log(text).is_err(), "{text}");
    }
}
